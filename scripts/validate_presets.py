"""Print how far derived presets lie from those that NVIDIA tuned, so that nobody takes a derivation for a measurement.

    python scripts/validate_presets.py           # a line per preset, then the figures that the README quotes
    python scripts/validate_presets.py --fit     # first fit the calibration again, and say whether it is the one in use

Of each tuned preset for full training, the four bulk layers and the two forward reduce-scatters are derived for the
same GPU and sizes; the other four layers can do nothing but ring exchange. A factor is the larger SM count over the
smaller, for layers where the methods agree.

What is held out: the SM counts of all rows but the fitted ones. Not the choice of method, for which every BF16 row was
looked at and FP8's rule was read from NVIDIA's own presets; nor the form of the model, which was found with all presets
in sight. Presets of several names with the same content count once per name.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from overlapkit.catalogue import find_gpu
from overlapkit.presets import Preset, load_preset, preset_names
from overlapkit.presets.derivation import CALIBRATION, Calibration, derive
from overlapkit.presets.times import Inputs, inputs_of_hidden_size

GATHERS = ("qkv_dgrad", "fc1_dgrad")
REDUCES = ("qkv_wgrad", "fc1_wgrad")
FORWARD = ("proj_fprop", "fc2_fprop")
FITTED = "fitted on: H100 BF16 of Megatron-Bridge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tuned preset, and what the derivation starts from in its place."""

    preset: Preset
    group: str
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One layer of one preset: the tuned and the derived choice."""

    layer: str
    tuned: tuple[str, int | None]
    derived: tuple[str, int]

    @property
    def same_method(self) -> bool:
        return self.tuned[0] == self.derived[0]

    @property
    def factor(self) -> float | None:
        """The larger SM count over the smaller; None where a ring leaves nothing to compare."""
        if not self.same_method or self.derived[0] == "ring_exchange" or self.tuned[1] is None:
            return None
        return max(self.tuned[1] / self.derived[1], self.derived[1] / self.tuned[1])

    def __str__(self) -> str:
        factor = "" if self.factor is None else f" ×{self.factor:.1f}"
        return f"{self.layer} {_shown(self.tuned)}→{_shown(self.derived)}{factor}"


def _shown(choice: tuple[str, int | None]) -> str:
    return "ring" if choice[0] == "ring_exchange" else f"{choice[0]} {choice[1]}"


def tuned_rows() -> list[Row]:
    """The tuned presets for full training; LoRA presets have no weight gradients and other methods for dgrad."""
    presets = [load_preset(name) for name in preset_names()]
    return [
        Row(preset=preset, group=_group(preset), inputs=_inputs(preset))
        for preset in presets
        if preset.provenance != "derived" and not preset.lora
    ]


def _group(preset: Preset) -> str:
    if (preset.gpu, preset.precision, preset.provenance) == ("h100", "bf16", "bridge"):
        return FITTED
    return f"not fitted: {preset.gpu.upper()} {preset.precision.upper()}"


def _inputs(preset: Preset) -> Inputs:
    gpu = find_gpu(preset.gpu)
    if gpu is None:
        raise SystemExit(f"{preset.name}: {preset.gpu} is not in data/gpus.yaml")
    return inputs_of_hidden_size(
        gpu,
        cast("Literal['bf16', 'fp8']", preset.precision),
        hidden_size=preset.hidden_size,
        tensor_model_parallel_size=preset.tensor_model_parallel_size,
        context_parallel_size=preset.context_parallel_size,
        micro_batch_size=preset.micro_batch_size,
        seq_length=preset.seq_length,
    )


def entries(
    row: Row, calibration: Calibration = CALIBRATION, layers: Iterable[str] = (*GATHERS, *REDUCES, *FORWARD)
) -> list[Entry]:
    derived = derive(row.inputs, calibration)
    return [
        Entry(
            layer=layer,
            tuned=(row.preset.userbuffers[layer]["method"], row.preset.userbuffers[layer].get("num_sm")),
            derived=(derived[layer].options["method"], derived[layer].options["num_sm"]),
        )
        for layer in layers
    ]


def sm_counts(found: Iterable[Entry]) -> str:
    """Median and worst factor of the SM counts."""
    factors = [entry.factor for entry in found if entry.factor is not None]
    within = sum(factor <= 2 for factor in factors)
    return (
        f"{len(factors)} SM counts, median ×{statistics.median(factors):.2f}, worst ×{max(factors):.1f}, "
        f"{within} within ×2 ({100 * within / len(factors):.0f} %)"
    )


def methods(found: Iterable[Entry]) -> str:
    """How often proj_fprop and fc2_fprop, the layers with a choice, have the tuned preset's method."""
    forward = [entry.same_method for entry in found if entry.layer in FORWARD]
    return f"{sum(forward)} of {len(forward)} methods agree"


def loss(rows: Iterable[Row], calibration: Calibration, layers: Iterable[str]) -> float:
    """Mean |log2 factor|, and 1 for each layer of another method: what the fit makes small."""
    found = [entry for row in rows for entry in entries(row, calibration, layers)]
    factors = [abs(math.log2(entry.factor)) for entry in found if entry.factor is not None]
    return sum(not entry.same_method for entry in found) + (statistics.mean(factors) if factors else 0.0)


def disagreements(rows: Iterable[Row], calibration: Calibration) -> int:
    """Forward reduce-scatters with another method than the tuned preset's."""
    return sum(not entry.same_method for row in rows for entry in entries(row, calibration, FORWARD))


def fit(rows: Sequence[Row]) -> Calibration:
    """The calibration of least loss on a coarse grid; eight entries for each figure do not carry a finer one.

    A ring's cost decides methods alone and is chosen on all BF16 rows, the rest on the rows of `FITTED`. What a lost SM
    costs shifts the bulk layers a little, so their rates come last.
    """
    fitted = [row for row in rows if row.group == FITTED]
    bf16 = [row for row in rows if row.preset.precision == "bf16"]
    forward = best(
        fitted,
        FORWARD,
        (
            replace(CALIBRATION, pipeline_reduce_scatter=float(rate), sm_cost=cost)
            for rate, cost in itertools.product(range(3, 11), (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0))
        ),
    )
    rings = [replace(forward, ring_cost=cost / 100) for cost in range(0, 17, 2)]
    ring = min(rings, key=lambda calibration: disagreements(bf16, calibration))
    gathers = best(fitted, GATHERS, (replace(ring, bulk_all_gather=float(rate)) for rate in range(4, 20, 2)))
    return best(fitted, REDUCES, (replace(gathers, bulk_reduce_scatter=rate / 2) for rate in range(3, 10)))


def best(rows: Sequence[Row], layers: Sequence[str], candidates: Iterable[Calibration]) -> Calibration:
    """The candidate of least loss; of equals the first."""
    return min(candidates, key=lambda calibration: loss(rows, calibration, layers))


def of_the_defaults(rows: Iterable[Row]) -> list[Entry]:
    """What Transformer Engine does without a configuration, in the place of the derivation: the yardstick."""
    defaults = dict.fromkeys((*GATHERS, *REDUCES), ("bulk", 16)) | dict.fromkeys(FORWARD, ("pipeline", 16))
    return [replace(entry, derived=defaults[entry.layer]) for row in rows for entry in entries(row)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the calibration again on the rows it was fitted on")
    options = parser.parse_args(arguments)
    rows = tuned_rows()
    groups: dict[str, list[Entry]] = {FITTED: []}
    for row in sorted(rows, key=lambda row: (row.group != FITTED, row.group, row.preset.name)):
        if row.group not in groups or not groups[row.group]:
            print(f"\n{row.group}")
        found = entries(row)
        groups.setdefault(row.group, []).extend(found)
        print(f"  {row.preset.name}\n    {', '.join(map(str, found))}")
    print_summary(rows, groups)
    if not options.fit:
        return 0
    again = fit(rows)
    print(f"\nFitted again: {again}\nIn use:       {CALIBRATION}")
    return 0 if again == CALIBRATION else 1


def print_summary(rows: Sequence[Row], groups: dict[str, list[Entry]]) -> None:
    print("\nSummary")
    for group, found in groups.items():
        print(f"  {group}: {sm_counts(found)}; {methods(found)}")
    held_out = [entry for group, found in groups.items() if group != FITTED for entry in found]
    print(f"  not fitted, all: {sm_counts(held_out)}; {methods(held_out)}")
    defaults = of_the_defaults(row for row in rows if row.group != FITTED)
    print(f"  Transformer Engine's defaults on the same rows: {sm_counts(defaults)}; {methods(defaults)}")


if __name__ == "__main__":
    sys.exit(main())
