"""Presets as a list and one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from overlapkit.presets import Preset
from overlapkit.presets.configurations import Configuration, of_preset
from overlapkit.presets.differences import aliases
from overlapkit.render.buffers import mib, write_buffers, write_table
from overlapkit.render.text import grid, print_on, title
from overlapkit.userbuffers.check import LayerFlags, Report, check_userbuffers

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = {
    "gpu": "GPU",
    "precision": "precision",
    "hidden_size": "hidden",
    "tensor_model_parallel_size": "TP",
    "context_parallel_size": "CP",
    "micro_batch_size": "MBS",
    "seq_length": "sequence",
    "provenance": "from",
    "name": "name",
}


def header(preset: Preset) -> dict[str, Any]:
    """Everything about a preset but its configuration."""
    return {name: getattr(preset, name) for name in Preset.__dataclass_fields__ if name != "userbuffers"}


def print_list(headers: Sequence[Mapping[str, Any]], stream: IO[str]) -> None:
    """One line per preset."""
    rows = [[str(each[name]) for name in _COLUMNS] for each in headers]
    print_on(stream, lambda out: write_table(out, list(_COLUMNS.values()), rows))


def report_of(configuration: Configuration, *, transformer_engine: str) -> Report:
    """What Transformer Engine makes of a preset in the shape and precision that it was made for."""
    return check_userbuffers(
        configuration.ub_cfgs,
        transformer_engine=transformer_engine,
        tensor_model_parallel_size=configuration.tensor_model_parallel_size or 1,
        tokens=configuration.tokens,
        hidden_size=configuration.hidden_size,
        quantization_modes=("fp8",) if configuration.precision == "fp8" else ("none",),
        flags=LayerFlags(tp_comm_overlap_rs_dgrad=configuration.tp_comm_overlap_rs_dgrad),
    )


def print_preset(preset: Preset, stream: IO[str], *, transformer_engine: str) -> None:
    """What the preset was made for, a row per buffer, and for a derived one why each is as it is."""
    configuration = of_preset(preset, source=preset.name)
    report = report_of(configuration, transformer_engine=transformer_engine)

    def write(out: Console) -> None:
        _write_head(preset, aliases(configuration), out)
        out.print()
        write_buffers(
            out,
            report.buffers,
            tensor_model_parallel_size=preset.tensor_model_parallel_size,
            tokens=preset.tokens_per_rank,
            hidden_size=preset.hidden_size,
            named=preset.userbuffers,
        )
        size = mib(report.bytes or 0)
        out.print(f"{size} of buffers on each GPU, as Transformer Engine {transformer_engine} has them")
        if preset.derivation is not None:
            _write_derivation(preset.derivation, out)

    print_on(stream, write)


def _write_head(preset: Preset, twins: Sequence[str], out: Console) -> None:
    out.print(preset.name, style="bold", soft_wrap=True)
    parts = [
        *(preset.gpu, preset.precision.upper(), f"hidden {preset.hidden_size}"),
        f"TP {preset.tensor_model_parallel_size}",
        f"CP {preset.context_parallel_size}",
        f"MBS {preset.micro_batch_size}",
        f"sequence {preset.seq_length}",
        *(["LoRA"] if preset.lora else []),
    ]
    out.print(" · ".join(parts))
    computed = " (computed, neither tuned nor measured)" if preset.derived else ""
    out.print(f"{preset.provenance}{computed}: {preset.source}", soft_wrap=True)
    if preset.variant:
        out.print(f"variant {preset.variant}: chosen by name only, never by auto", soft_wrap=True)
    if twins:
        out.print(f"the same content: {', '.join(twins)}", soft_wrap=True)


def _write_derivation(derivation: Mapping[str, Any], out: Console) -> None:
    title(out, f"Why, from computed times of one layer of {derivation['model']} (nothing here is measured)")
    titles = ("layer", "GEMM us", "collective us", "ratio", "because")
    rows = [[(text, "bold") for text in titles]]
    for layer, entry in derivation["layers"].items():
        times = (entry["gemm_us"], entry["collective_us"], entry["ratio"], entry["because"])
        rows.append([(layer, ""), *((str(value), "") for value in times)])
    grid(out, rows)
    share = 100 * derivation["communication_share"]
    out.print(
        f"All TP communication at wire speed takes {share:.0f} % of the GEMMs' time: "
        "what TP overlap can save is less than that."
    )
