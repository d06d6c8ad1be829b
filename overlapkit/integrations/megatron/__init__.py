"""A plan and the real objects of Megatron-Core, and the environment of the process that trains with them.

Every name is imported on first use, and torch and megatron-core not before a function needs them:

- ``apply(plan, model_config, optimizer_config, ddp_config)``: writes a plan's settings on live objects.
- ``from_megatron(model_config, optimizer_config, ddp_config, gpu=...)``: live objects as a recipe.
- ``validate(recipe)``: a plan that the installed megatron-core was asked about too.
- ``check_environment(plan_or_recipe)``: what the process environment lacks, has otherwise, or got too late.

``python -m overlapkit.integrations.megatron --check recipe.yaml`` does the last from a launch script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapkit.integrations.megatron.application import apply as apply
    from overlapkit.integrations.megatron.environment import EnvironmentFinding as EnvironmentFinding
    from overlapkit.integrations.megatron.environment import check_environment as check_environment
    from overlapkit.integrations.megatron.live_recipe import from_megatron as from_megatron
    from overlapkit.integrations.megatron.validation import validate as validate
    from overlapkit.integrations.megatron.validation import validated as validated

# Modules are not called as what is in them: importing one would take its function's place here.
_HOME = {
    "EnvironmentFinding": "environment",
    "apply": "application",
    "check_environment": "environment",
    "from_megatron": "live_recipe",
    "validate": "validation",
    "validated": "validation",
}
__all__ = ["EnvironmentFinding", "apply", "check_environment", "from_megatron", "validate", "validated"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
