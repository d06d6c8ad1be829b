"""Communication overlap for Megatron-Bridge and Megatron-Core, answered before launch.

The public API; every name is imported on first use, so that ``import overlapkit`` costs nothing:

- ``load_recipe(path, overrides)``: a YAML recipe as a :class:`overlapkit.recipe.Recipe`.
- ``resolve(recipe)``: its :class:`overlapkit.plan.Plan`; takes a path, a mapping or a ``Recipe``.
- ``volume(recipe)``: its :class:`overlapkit.volume.Volume`, the bytes that each group moves per step.
- ``estimate(recipe)``: its :class:`overlapkit.cost.result.Estimate`, how long a step takes and where the time goes.
- ``measure(paths)``: what logs and traces show, as a :class:`overlapkit.measure.measured.Measured`.
- ``compare(recipe, paths)``: both side by side, as a :class:`overlapkit.measure.comparison.Comparison`.
- ``CommOverlapConfig``: Megatron-Bridge's class of that name, which :mod:`overlapkit.comm_overlap` decides.
- ``RecipeError``: what all of them raise when a recipe cannot be used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlapkit.comm_overlap import CommOverlapConfig as CommOverlapConfig
    from overlapkit.cost.estimate import estimate as estimate
    from overlapkit.errors import RecipeError as RecipeError
    from overlapkit.measure import measure as measure
    from overlapkit.measure.comparison import compare as compare
    from overlapkit.plan import Plan as Plan
    from overlapkit.recipe import Recipe as Recipe
    from overlapkit.recipe import load_recipe as load_recipe
    from overlapkit.resolver import resolve as resolve
    from overlapkit.volume import volume as volume

__version__ = "0.1.0"
__all__ = [
    "CommOverlapConfig",
    "Plan",
    "Recipe",
    "RecipeError",
    "__version__",
    "compare",
    "estimate",
    "load_recipe",
    "measure",
    "resolve",
    "volume",
]

_HOME = {
    "CommOverlapConfig": "overlapkit.comm_overlap",
    "Plan": "overlapkit.plan",
    "Recipe": "overlapkit.recipe",
    "RecipeError": "overlapkit.errors",
    "compare": "overlapkit.measure.comparison",
    "estimate": "overlapkit.cost.estimate",
    "load_recipe": "overlapkit.recipe",
    "measure": "overlapkit.measure",
    "resolve": "overlapkit.resolver",
    "volume": "overlapkit.volume",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'overlapkit' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOME[name])
    # A package of the name of its function is called as the function: `import overlapkit.volume` puts it here as well.
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value
