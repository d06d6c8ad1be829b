"""An estimate as a table for spreadsheets: a line per figure, those of kinds ``part`` and ``exposed`` make the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlapkit.cost.result import Estimate
from overlapkit.render.estimate_parts import ordered_groups, parts_of
from overlapkit.render.volume_csv import written

_COLUMNS = ("recipe", "gpu", "kind", "name", "value", "unit", "share_of_step", "low", "high")
_COMMUNICATION = ("message_bytes", "total_s", "hidden_s")


def to_csv(estimate: Estimate) -> str:
    """Comma-separated values with a line of titles, so that several recipes' lines can stand below each other.

    ``kind`` is ``step``, ``rate``, ``part`` (compute and waiting), ``exposed`` (an axis's communication), ``saves``
    (an overlap), ``note`` or ``assumed``. ``low`` and ``high`` are the interval's ends in the unit of ``value``.
    """
    about = {"recipe": estimate.recipe, "gpu": estimate.gpu}
    return written((*_COLUMNS, *_COMMUNICATION), ({**about, **line} for line in _lines(estimate)))


def _lines(estimate: Estimate) -> Iterator[dict[str, Any]]:
    step = estimate.step_time_s
    low, high = estimate.interval_s
    yield {"kind": "step", "name": "step_time", **_seconds(step, step), "low": low, "high": high}
    for name, unit in (("tokens_per_s_per_gpu", "tokens/s"), ("model_tflops_per_gpu", "TFLOP/s"), ("mfu", "")):
        yield {"kind": "rate", "name": name, "value": getattr(estimate, name), "unit": unit}
    for name, seconds in parts_of(estimate).items():
        yield {"kind": "part", "name": name.removesuffix("_s"), **_seconds(seconds, step)}
    for axis, time in ordered_groups(estimate):
        yield {"kind": "exposed", "name": axis, **_seconds(time.exposed_s, step), **time.to_dict()}
    for name, saving in estimate.saves.items():
        ends = {"low": saving.low_share * step, "high": saving.high_share * step}
        yield {"kind": "saves", "name": name, **_seconds(saving.seconds, step), **ends}
    for kind, texts in (("note", estimate.notes), ("assumed", estimate.assumed)):
        for text in texts:
            yield {"kind": kind, "name": text}


def _seconds(seconds: float, step_s: float) -> dict[str, Any]:
    return {"value": seconds, "unit": "s", "share_of_step": seconds / step_s}
