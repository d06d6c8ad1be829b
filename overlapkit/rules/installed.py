"""CFG: what the installed packages say when a recipe is tried on them; see overlapkit.integrations.megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlapkit.errors import printable
from overlapkit.rules.registry import MEGATRON_CORE, Verdict, error, observation, warning


@observation("CFG018", source="the constructors of the installed megatron-core")
def refused_by_installed_core(section: str, message: str, version: str, *, named: str | None) -> Verdict:
    """The installed Megatron-Core refuses to construct the recipe's configuration.

    Found by ``overlapkit resolve --validate``, which constructs the real TransformerConfig, OptimizerConfig and
    DistributedDataParallelConfig with the plan's settings. The text is Megatron-Core's own, of the first thing that it
    refuses, whether or not a rule found it before. A warning where the recipe names a release that is not the installed
    one: that may accept it.

    Why: the job would stop at the same point, after it was scheduled.
    Fix: change what the message names.
    """
    because = f"megatron-core {version} as installed here says: {printable(message, limit=600)}"
    fix = "change what the message names"
    if named is not None:
        fix = f"{fix}, or validate where megatron-core {named} is installed"
    verdict = error(section, because, fix=fix, by=MEGATRON_CORE, at="validation")
    return verdict if named is None else replace(verdict, severity="warning")


@observation("CFG019", source="overlapkit: what the installed packages can tell")
def not_checked_by_installed_core(because: Sequence[str]) -> Verdict:
    """What ``overlapkit resolve --validate`` could not check here.

    The installed Megatron-Core is not of the release that the plan is for, has no field for what the recipe sets, or
    constructs nothing because a size is not given.

    Why: a check with another release neither proves nor disproves that the job will start.
    Fix: validate where the training container's Megatron-Core is installed, and give the sizes.
    """
    fix = "validate where the container's megatron-core is installed, with every size given"
    return warning("recipe", "; ".join(because), fix=fix)
