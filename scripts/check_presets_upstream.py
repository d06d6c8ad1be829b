"""Compare the presets under presets/userbuffers with Megatron-Bridge's own definitions.

Usage: python scripts/check_presets_upstream.py [PATH/TO/megatron/bridge/training/comm_overlap.py]

Without a path the wheel of Megatron-Bridge 0.6.2 is downloaded with pip. The source is
only parsed, never imported or executed, so neither torch nor Megatron is needed.

Exit codes: 0 every preset agrees, 1 a preset differs, 2 the source cannot be read.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BRIDGE = "megatron-bridge==0.6.2"
MODULE = "megatron/bridge/training/comm_overlap.py"
PRESETS = Path(__file__).resolve().parent.parent / "presets" / "userbuffers"
PREFIX = "userbuffers_"
NAME = re.compile(
    r"userbuffers_(?P<precision>bf16|fp8)_(?P<gpu>[a-z0-9]+)_h(?P<hidden_size>\d+)"
    r"_tp(?P<tensor_model_parallel_size>\d+)(?:_cp(?P<context_parallel_size>\d+))?"
    r"_mbs(?P<micro_batch_size>\d+)_seqlen(?P<seq_length>\d+)(?P<lora>_lora)?"
)

# A dataclass as its fields in order, each with its default, or None where it has none.
Fields = dict[str, ast.expr | None]


class UpstreamError(Exception):
    """Bridge's source cannot be obtained, or not be evaluated by reading alone."""


def download_source() -> str:
    """Return the text of comm_overlap.py from the wheel of `BRIDGE`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--ignore-requires-python", "--only-binary", ":all:", "--dest", folder, BRIDGE]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise UpstreamError(f"pip could not download {BRIDGE}: {finished.stderr.strip()}")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MODULE).decode()


def read_classes(tree: ast.Module) -> dict[str, Fields]:
    """Return the annotated fields of every class, those of its bases first."""
    classes: dict[str, Fields] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields: Fields = {}
        for base in node.bases:
            if isinstance(base, ast.Name):
                fields |= classes.get(base.id, {})
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = statement.value
        classes[node.name] = fields
    return classes


def evaluate(node: ast.expr, classes: Mapping[str, Fields]) -> object:
    """Evaluate a literal, or the call of a dataclass as the mapping of its fields."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
        fields = classes[node.func.id]
        given: dict[str | None, ast.expr] = dict(zip(fields, node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords}
        if len(node.args) > len(fields) or not given.keys() <= fields.keys():
            raise UpstreamError(f"line {node.lineno}: {node.func.id} has other fields than these")
        values: dict[str, object] = {}
        for name, default in fields.items():
            value = given.get(name, default)
            if value is None:
                raise UpstreamError(f"line {node.lineno}: {node.func.id} without {name}")
            values[name] = evaluate(value, classes)
        return values
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        reason = f"cannot read {ast.unparse(node)!r} without running it"
        raise UpstreamError(f"line {node.lineno}: {reason}") from error


def as_transformer_engine_reads(value: object) -> object:
    """Drop None entries, as Bridge does, and take a tuple for its truth, as TE does."""
    if isinstance(value, dict):
        items = value.items()
        return {k: as_transformer_engine_reads(v) for k, v in items if v is not None}
    return bool(value) if isinstance(value, tuple) else value


def upstream_presets(source: str) -> dict[str, object]:
    """Return every module-level ``userbuffers_*`` object of Bridge's source, by name."""
    tree = ast.parse(source)
    classes = read_classes(tree)
    presets: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id.startswith(PREFIX):
                presets[target.id] = as_transformer_engine_reads(evaluate(value, classes))
    if not presets:
        raise UpstreamError(f"no {PREFIX}* preset found: is this Bridge's comm_overlap.py?")
    return presets


def differences(ours: object, theirs: object, path: str, source: str) -> Iterator[str]:
    """Yield one line for each value that differs from `source`'s, True and 1 being different."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            if key not in ours:
                yield f"{path}.{key}: missing, {source} has {theirs[key]!r}"
            elif key not in theirs:
                yield f"{path}.{key}: {ours[key]!r}, {source} has no such entry"
            else:
                yield from differences(ours[key], theirs[key], f"{path}.{key}", source)
    elif type(ours) is not type(theirs) or ours != theirs:
        yield f"{path}: {ours!r}, {source} has {theirs!r}"


def header_from_name(name: str) -> dict[str, object]:
    """Return the header fields that a preset's name spells out, ``name`` itself included."""
    header: dict[str, object] = {"name": name}
    match = NAME.fullmatch(name)
    if match is None:
        return header
    for key, text in match.groupdict().items():
        if key == "lora":
            header[key] = text is not None
        elif key in ("gpu", "precision"):
            header[key] = text
        else:
            header[key] = int(text or 1)  # a name without cp means no context parallelism
    return header


def check(upstream: Mapping[str, object], folder: Path = PRESETS) -> Iterator[str]:
    """Yield one line for each disagreement between the files in `folder` and Bridge."""
    seen: set[str] = set()
    for path in sorted(folder.glob("*.yaml")):
        preset = yaml.safe_load(path.read_text(encoding="utf-8"))
        expected = header_from_name(path.stem)
        found = {key: preset.get(key) for key in expected}
        for line in differences(found, expected, "header", "its file name"):
            yield f"{path.name}: {line}"
        if preset.get("provenance") != "bridge":
            continue
        seen.add(path.stem)
        if path.stem not in upstream:
            yield f"{path.name}: Bridge has no preset of this name"
            continue
        theirs = upstream[path.stem]
        for line in differences(preset.get("userbuffers"), theirs, "userbuffers", "Bridge"):
            yield f"{path.name}: {line}"
    for name in sorted(upstream.keys() - seen):
        yield f"{name}.yaml: missing, or without 'provenance: bridge'"


def main(arguments: list[str]) -> int:
    """Run the comparison and return the exit code."""
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        source = Path(arguments[0]).read_text(encoding="utf-8") if arguments else download_source()
        upstream = upstream_presets(source)
    except (OSError, SyntaxError, UpstreamError) as error:
        print(f"check_presets_upstream: {error}", file=sys.stderr)
        return 2
    problems = list(check(upstream))
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(upstream)} presets agree with Megatron-Bridge")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
