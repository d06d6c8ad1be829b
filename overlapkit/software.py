"""Which versions the training container has: what the recipe names, and what is assumed for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overlapkit.catalogue import SoftwareRow, row_of_bridge, row_of_container, software_rows
from overlapkit.errors import RecipeError, nearest, shown
from overlapkit.recipe.sections import Software
from overlapkit.versions import Version, parse_version

DETECT = "detect"
_COMPONENTS = ("megatron_bridge", "megatron_core", "transformer_engine", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of the target. ``megatron_bridge`` is None for Megatron-LM, ``transformer_engine`` when absent.

    ``assumed`` names the components that the recipe does not; ``row`` is where they were taken from.
    """

    megatron_bridge: Version | None
    megatron_core: Version
    transformer_engine: Version | None
    torch: Version
    assumed: tuple[str, ...]
    row: str


def resolve_versions(software: Software, *, megatron_lm: bool, fail: Callable[..., RecipeError]) -> Versions:
    """Each component: as named, else from the container's row, else the named Bridge's, else the newest row.

    Raises:
        RecipeError: an unknown container, or text that is not a version.
    """
    row = _row(software, fail)
    chosen: dict[str, Version | None] = {}
    assumed = []
    for component in _COMPONENTS:
        if component == "megatron_bridge" and megatron_lm:
            chosen[component] = None
            continue
        named = getattr(software, component)
        if component == "transformer_engine":
            if software.transformer_engine_absent:
                chosen[component] = None
                continue
            if named == DETECT:
                chosen[component] = installed_transformer_engine()
                continue
        if named is None:
            assumed.append(component)
            named = getattr(row, component)
        chosen[component] = _parsed(named, f"software.{component}", fail)
    core, torch = chosen["megatron_core"], chosen["torch"]
    assert core is not None and torch is not None
    return Versions(
        megatron_bridge=chosen["megatron_bridge"],
        megatron_core=core,
        transformer_engine=chosen["transformer_engine"],
        torch=torch,
        assumed=tuple(assumed),
        row=row.name,
    )


def _row(software: Software, fail: Callable[..., RecipeError]) -> SoftwareRow:
    if software.container is not None:
        row = row_of_container(software.container)
        if row is None:
            names = [known.name for known in software_rows() if known.is_container]
            near = nearest(software.container, names)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(names)}; or name the versions"
            raise fail("software.container", f"{shown(software.container)} is not a known container", hint)
        return row
    if software.megatron_bridge is not None:
        _parsed(software.megatron_bridge, "software.megatron_bridge", fail)
        return row_of_bridge(software.megatron_bridge)
    return software_rows()[-1]


def _parsed(text: str, path: str, fail: Callable[..., RecipeError]) -> Version:
    try:
        return parse_version(text)
    except ValueError:
        raise fail(path, f"{shown(text)} is not a version", "write it as 2.10 or 0.6.2") from None


def installed_transformer_engine() -> Version | None:
    """Transformer Engine's version in this Python environment, from its metadata: nothing is imported.

    The metapackage alone is not enough: without its core library the import raises.
    """
    from importlib.metadata import PackageNotFoundError, version

    for name in ("transformer-engine-cu13", "transformer-engine-cu12", "transformer-engine-torch"):
        try:
            return parse_version(version(name))
        except (PackageNotFoundError, ValueError):
            continue
    try:
        meta = parse_version(version("transformer-engine"))
    except (PackageNotFoundError, ValueError):
        return None
    return meta if "+" in meta.text else None  # source builds, as in NGC, carry a local version
