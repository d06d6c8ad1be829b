"""What was written of a plan, read as a recipe again: the settings must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from overlapkit import Plan, resolve
from overlapkit.catalogue import software_rows
from overlapkit.recipe import Recipe, recipe_from_mapping
from overlapkit.recipe.known_keys import known_keys
from overlapkit.render.bridge_userbuffers import complete_layers
from overlapkit.render.bridge_values import uninterpolated

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml"))
# A ConfigContainer as Bridge hands it to OmegaConf, with nothing set.
BARE: dict[str, Any] = {
    **{section: {} for section in known_keys().sections},
    **dict.fromkeys(("comm_overlap", "mixed_precision", "peft")),
}


def shipped(path: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return recipe


def loaded(mapping: dict[str, Any]) -> tuple[Recipe, Plan]:
    recipe = recipe_from_mapping(mapping)
    return recipe, resolve(recipe)


def machine(mapping: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The cluster and software that a configuration for Bridge is read back with."""
    software = mapping["software"]
    if plan.target.framework == "megatron-lm":
        software = {"framework": "megatron-bridge", "megatron_bridge": software_rows()[-1].megatron_bridge}
    return {"cluster": mapping["cluster"], "software": software}


def in_bridge(tree: Mapping[str, Any], mapping: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The settings of what stands in a ConfigContainer; ``validation`` without a field is none of a recipe's."""
    said = {
        name: body for name, body in tree.items() if body != {} and not (body is None and name == "mixed_precision")
    }
    return dict(resolve({**said, **machine(mapping, plan)}).settings)


def written_settings(plan: Plan, said: tuple[str, ...]) -> dict[str, Any]:
    """The plan's settings; where a sentence says that layers were completed, with the options they left out.

    A null that stands on ``ddp`` stays one in Bridge; read as a recipe it is a value not set.
    """
    settings = dict(plan.settings)
    userbuffers = settings["model.tp_comm_overlap_cfg"]
    complete, foreign = complete_layers(userbuffers)
    if any("defaults for the rest" in sentence for sentence in said):
        assert not foreign and complete != userbuffers
        settings["model.tp_comm_overlap_cfg"] = complete
    if any(sentence.startswith("comm_overlap is null") for sentence in said):
        settings["ddp.delay_wgrad_compute"] = bool(settings["ddp.delay_wgrad_compute"])
    return settings


def as_text(value: Any) -> Any:
    """A tree whose texts are read as they are: no ``${`` in them is a reference."""
    if isinstance(value, str):
        return uninterpolated(value)
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value
