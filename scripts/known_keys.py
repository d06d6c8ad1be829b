"""Write overlapkit/data/known_keys.json: every key a recipe may have, read from the sources of the real packages.

    python scripts/known_keys.py                    # download the four wheels from PyPI, write the file
    python scripts/known_keys.py FOLDER WHEEL ...   # the same from wheels (or unpacked wheels) that are already here
    python scripts/known_keys.py --check            # write nothing; exit 1 when the committed file differs

The folder in OVERLAPKIT_WHEELS stands in for arguments. The sources are parsed, never imported: Megatron needs torch
and a GPU driver to import, and a recipe is checked where there is neither.

A section of a recipe is a field of Bridge's ConfigContainer. Its keys are those of every class which that field can
hold: the classes its annotation names, what they inherit (from megatron.core and megatron.training too), and what
derives from them. The value of a key lists the snapshots that define it, as digits: "13" is snapshots 1 and 3.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SNAPSHOTS = ("megatron-core 0.16.1", "megatron-core 0.19.2", "megatron-bridge 0.3.1", "megatron-bridge 0.6.2")
# A Bridge inherits from the Core of its age; what it inherits counts for both.
BRIDGE_ON_CORE = {2: 0, 3: 1}

CONTAINER = "megatron.bridge.training.config.ConfigContainer"
# Where ConfigContainer's annotations do not lead to every class that a field holds in practice: a distillation student
# is a plain TransformerConfig, and FalconH1, Wan and Flux have providers of their own.
MORE_ROOTS = {
    "model": (
        "megatron.core.transformer.transformer_config.TransformerConfig",
        "megatron.bridge.models.model_provider.ModelProviderMixin",
    ),
}
OUR_PACKAGES = ("megatron.core.", "megatron.training.", "megatron.bridge.")
FREE_KEYS = "*"  # the key of a section that is a plain dict, such as env_vars

DATA = Path(__file__).resolve().parent.parent / "overlapkit" / "data" / "known_keys.json"
Sections = dict[str, dict[str, str]]


class SourceError(Exception):
    """The wheels are missing, unreadable, or no longer built the way this script reads them."""


@dataclass(frozen=True, slots=True)
class ClassRef:
    """A class statement, the module it stands in, and the snapshot that ships it."""

    module: str
    node: ast.ClassDef
    snapshot: int

    @property
    def path(self) -> str:
        return f"{self.module}.{self.node.name}"


@dataclass(frozen=True)
class Module:
    """One parsed source file: what each module-level name is bound to."""

    name: str
    is_package: bool
    snapshot: int
    source: str

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        found = [node for node in self._statements if isinstance(node, ast.ClassDef)]
        return {node.name: node for node in reversed(found)}

    @cached_property
    def aliases(self) -> dict[str, list[str]]:
        """Local name -> dotted paths it may stand for, from imports and `Name = other.Name`; "*" for star imports."""
        found: dict[str, list[str]] = defaultdict(list)
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        for node in self._statements:
            if isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), package)
                for name in node.names:
                    found[name.asname or name.name].append(origin if name.name == "*" else f"{origin}.{name.name}")
            elif isinstance(node, ast.Import):
                for name in node.names:
                    head = name.name.partition(".")[0]
                    found[name.asname or head].append(name.name if name.asname else head)
            elif isinstance(node, ast.Assign) and (value := dotted(node.value)):
                found[dotted(node.targets[0]) or ""].append(f"{self.name}.{value}")
        return found

    @cached_property
    def _statements(self) -> list[ast.AST]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in their docstrings are not our concern
            return list(statements(ast.parse(self.source, filename=self.name).body))


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a body and of its try, if and with blocks, where optional imports live."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from statements(ast.iter_child_nodes(node))


def dotted(node: ast.expr) -> str | None:
    """`a.b.C` for a name or attribute chain, subscripts such as `C[T]` ignored; None for any other expression."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else None
    return node.id if isinstance(node, ast.Name) else None


class Sources:
    """The modules of one Bridge and its Core, with names resolved across them."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = modules

    def resolve(self, path: str, seen: frozenset[str] = frozenset()) -> ClassRef | None:
        """The class at a dotted path, through re-exports; None when it is no class or lies outside these sources."""
        if path in seen:
            return None
        seen = seen | {path}
        parts = path.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = self.modules.get(".".join(parts[:end]))
            if module is None:
                continue
            head, rest = parts[end], parts[end + 1 :]
            if head in module.classes and not rest:
                return ClassRef(module.name, module.classes[head], module.snapshot)
            targets = module.aliases.get(head) or [f"{star}.{head}" for star in module.aliases.get("*", ())]
            found = (self.resolve(".".join([target, *rest]), seen) for target in targets)
            return next((ref for ref in found if ref), None)
        return None

    def bases(self, ref: ClassRef) -> list[ClassRef]:
        """The direct bases that lie in these sources. A base of ours that cannot be found is an error, not a gap."""
        found = []
        for name in filter(None, map(dotted, ref.node.bases)):
            head, dot, rest = name.partition(".")
            imported = [f"{origin}{dot}{rest}" for origin in self.modules[ref.module].aliases.get(head, ())]
            # `class Name(Name)` extends the import of that name, not itself.
            paths = imported if name == ref.node.name else [f"{ref.module}.{name}"]
            base = next(filter(None, map(self.resolve, paths)), None)
            if base:
                found.append(base)
            elif any(path.startswith(OUR_PACKAGES) for path in imported):
                raise SourceError(f"{ref.path}: its base {name} is not in the sources")
        return found

    def lineage(self, ref: ClassRef) -> dict[str, ClassRef]:
        """The class and everything it inherits from, by path."""
        found = {ref.path: ref}
        for base in self.bases(ref):
            found |= self.lineage(base)
        return found

    @cached_property
    def derived(self) -> dict[str, list[ClassRef]]:
        """For every class, the classes of Bridge that derive from it, directly or not."""
        found: dict[str, list[ClassRef]] = defaultdict(list)
        for module in self.modules.values():
            if module.snapshot not in BRIDGE_ON_CORE:
                continue
            for node in module.classes.values():
                ref = ClassRef(module.name, node, module.snapshot)
                for path in self.lineage(ref):
                    found[path].append(ref)
        return found

    def keys(self, ref: ClassRef) -> dict[str, set[int]]:
        """The keys of a section's root class: own, inherited, and those of the classes that derive from it."""
        ancestors: dict[str, ClassRef] = {}
        for holder in [ref, *self.derived.get(ref.path, [])]:
            ancestors |= self.lineage(holder)
        found: dict[str, set[int]] = defaultdict(set)
        for ancestor in ancestors.values():
            for key in own_keys(ancestor.node):
                found[key].add(ancestor.snapshot)
        return found


def own_keys(node: ast.ClassDef) -> Iterator[str]:
    """Dataclass fields in the body, plus the parameters of a hand-written __init__; private names and ClassVars out."""
    names: list[str] = []
    for item in statements(node.body):
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
            names += [argument.arg for argument in arguments[1:]]  # without self
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_dataclass(node):
            names += [] if "ClassVar" in ast.unparse(item.annotation) else [item.target.id]
    return (name for name in names if not name.startswith("_"))


def is_dataclass(node: ast.ClassDef) -> bool:
    calls = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return any((dotted(call) or "").rpartition(".")[2] == "dataclass" for call in calls)


def read_sections(sources: Sources) -> dict[str, dict[str, set[int]]]:
    """All sections of one Bridge, and under "" the names of the sections themselves."""
    container = sources.resolve(CONTAINER)
    if container is None:
        raise SourceError(f"{CONTAINER} is not in the sources")
    found: dict[str, dict[str, set[int]]] = {"": {}}
    for item in statements(container.node.body):
        if not (isinstance(item, ast.AnnAssign) and (section := dotted(item.target))) or section.startswith("_"):
            continue
        found[""][section] = {container.snapshot}
        if dotted(item.annotation) in ("dict", "Dict"):
            found[section] = {FREE_KEYS: {container.snapshot}}
            continue
        names = {dotted(node) for node in ast.walk(item.annotation) if isinstance(node, (ast.Name, ast.Attribute))}
        paths = [f"{container.module}.{name}" for name in names if name] + list(MORE_ROOTS.get(section, ()))
        roots = [ref for ref in map(sources.resolve, paths) if ref]
        if not roots:
            raise SourceError(f"the annotation of {CONTAINER}.{section} leads to no class")
        found[section] = defaultdict(set)
        for key, snapshots in (pair for root in roots for pair in sources.keys(root).items()):
            found[section][key] |= snapshots | {container.snapshot}
    return found


def find_snapshots(paths: list[Path]) -> dict[int, Path]:
    """Snapshot index -> wheel or unpacked wheel, among the paths and what lies directly in them."""
    candidates = [item for path in paths for item in [path, *(sorted(path.iterdir()) if path.is_dir() else [])]]
    found = {}
    for index, name in enumerate(SNAPSHOTS):
        stem = name.replace("-", "_").replace(" ", "-")
        for item in candidates:
            is_wheel = item.suffix == ".whl" and item.name.startswith(f"{stem}-")
            if is_wheel or (item / f"{stem}.dist-info").is_dir():
                found[index] = item
        if index not in found:
            raise SourceError(f"neither a wheel of {name} nor its unpacked files in {', '.join(map(str, paths))}")
    return found


def read_modules(path: Path, snapshot: int) -> dict[str, Module]:
    """The Python modules of a wheel or an unpacked wheel, by dotted name."""
    if path.is_dir():
        texts = {file.relative_to(path).as_posix(): file.read_text("utf-8") for file in path.rglob("*.py")}
    else:
        with zipfile.ZipFile(path) as wheel:
            texts = {name: wheel.read(name).decode("utf-8") for name in wheel.namelist() if name.endswith(".py")}
    found = {}
    for file_name, source in texts.items():
        path_name = file_name.removesuffix(".py").replace("/", ".")
        name = path_name.removesuffix(".__init__")
        found[name] = Module(name, name != path_name, snapshot, source)
    return found


def download(folder: Path) -> None:
    """Fetch the wheels into the folder. The Core wheels are compiled for Python 3.12 on Linux, whatever runs here."""
    for bridge, core in BRIDGE_ON_CORE.items():  # pip takes one version of a package at a time
        pins = [SNAPSHOTS[index].replace(" ", "==") for index in (core, bridge)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        command += ["--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64"]
        result = subprocess.run([*command, *pins], check=False, capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise SourceError(f"pip could not download {' '.join(pins)}: {reason}")


def known_keys(paths: list[Path]) -> Sections:
    """Section -> key -> digits of the snapshots that define it."""
    wheels = find_snapshots(paths)
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for bridge, core in BRIDGE_ON_CORE.items():
        sources = Sources(read_modules(wheels[core], core) | read_modules(wheels[bridge], bridge))
        for section, keys in read_sections(sources).items():
            merged = found[section]  # there even when empty: OptimizerConfigOverrideProvider has no fields
            for key, snapshots in keys.items():
                merged[key] |= snapshots
    return {
        section: {key: "".join(map(str, sorted(keys[key]))) for key in sorted(keys)}
        for section, keys in sorted(found.items())
    }


def check(text: str, generated: Sections) -> str | None:
    """Why the committed file is not this text, in one line; None when it is."""
    try:
        committed = DATA.read_text("utf-8")
        if committed == text:
            return None
        sections: Sections = json.loads(committed)["sections"]
        pairs = sorted({(section, key) for side in (sections, generated) for section in side for key in side[section]})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{DATA} cannot be read: {error!r}"
    found = []
    for section, key in pairs:
        old, new = (side.get(section, {}).get(key, "absent") for side in (sections, generated))
        if old != new:
            found.append(f"{section or 'section'}.{key} (file: {old}, sources: {new})")
    first = "; ".join(found[:5]) or "same keys, other formatting"
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{DATA} differs from the sources: {first}{more}. Run scripts/known_keys.py"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate the known recipe keys from the Megatron sources.")
    parser.add_argument("wheels", nargs="*", type=Path, help="wheels, unpacked wheels, or folders of them")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    options = parser.parse_args(arguments)
    folder = os.environ.get("OVERLAPKIT_WHEELS")
    local = options.wheels or ([Path(folder)] if folder else [])
    try:
        with tempfile.TemporaryDirectory() as temporary:
            if not local:
                download(Path(temporary))
            sections = known_keys(local or [Path(temporary)])
    except (SourceError, SyntaxError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        print(f"known_keys: {error}", file=sys.stderr)
        return 2
    text = json.dumps({"snapshots": SNAPSHOTS, "sections": sections}, indent=1) + "\n"
    if options.check:
        reason = check(text, sections)
        if reason:
            print(f"known_keys: {reason}", file=sys.stderr)
            return 1
        print(f"{DATA} is what the sources say")
        return 0
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(text, "utf-8")
    print(f"{DATA}: {len(sections) - 1} sections, {sum(map(len, sections.values()))} keys")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
