"""A YAML file that Megatron-Bridge merges over a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from overlapkit.plan import Plan
from overlapkit.recipe.sections import Recipe
from overlapkit.render.bridge_values import (
    bridge_tree,
    bridge_values,
    environment_elsewhere,
    is_word,
    uninterpolated,
)


def to_bridge_yaml(recipe: Recipe, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """The file for Bridge's ``--config-file`` and ``process_config_with_overrides``, and what it does not say.

    Objects have their ``_target_``: Bridge then builds them, where a bare mapping would stay one or, in place of
    None, fail in the set-up.
    """
    values = bridge_values(recipe, plan)
    text: str = yaml.dump(_uninterpolated(bridge_tree(values)), Dumper=_Dumper, sort_keys=False, width=120)
    return text, (*values.not_carried, *environment_elsewhere(values))


def _uninterpolated(value: Any) -> Any:
    """Texts that OmegaConf leaves as they are; it does not look into keys."""
    if isinstance(value, str):
        return uninterpolated(value)
    if isinstance(value, Mapping):
        return {key: _uninterpolated(item) for key, item in value.items()}
    return [_uninterpolated(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Dumper(yaml.SafeDumper):
    """Quotes all but words: OmegaConf reads more plain text as numbers than YAML 1.1 does, 1e3 for one."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if is_word(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
