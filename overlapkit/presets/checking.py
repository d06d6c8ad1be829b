"""A configuration put to Transformer Engine's model, with what the file says of its sizes and what the command does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlapkit.presets.configurations import Configuration
from overlapkit.userbuffers.check import LayerFlags, Report, check_userbuffers

_ASSUMED_TP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a command says; None leaves it to the file."""

    transformer_engine: str
    tensor_model_parallel_size: int | None = None
    tokens: int | None = None
    hidden_size: int | None = None
    quantization_modes: tuple[str, ...] | None = None
    tp_comm_overlap_rs_dgrad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The report, and what it was asked for: ``configuration`` has the sizes that were used."""

    configuration: Configuration
    report: Report
    transformer_engine: str
    tensor_model_parallel_size: int
    assumed_tp: bool
    quantization_modes: tuple[str, ...]

    @property
    def named(self) -> frozenset[str]:
        """The buffers for which the configuration has an entry."""
        modes, given = self.quantization_modes, self.configuration.ub_cfgs
        per_mode = given if isinstance(given, list) else [given] * len(modes)
        return frozenset(
            layer if len(modes) == 1 else f"{layer}@{mode}"
            for mode, layers in zip(modes, per_mode, strict=False)
            for layer in layers or {}
        )


def ask(configuration: Configuration, question: Question) -> Answer:
    """Judge a configuration; TP is assumed to be 8 where nobody says it, sizes stay unknown.

    Raises:
        RecipeError: a version or size that is none.
    """
    said = configuration.tensor_model_parallel_size
    tp = said if question.tensor_model_parallel_size is None else question.tensor_model_parallel_size
    used = replace(
        configuration,
        tokens=configuration.tokens if question.tokens is None else question.tokens,
        hidden_size=configuration.hidden_size if question.hidden_size is None else question.hidden_size,
    )
    modes = question.quantization_modes or _modes(configuration)
    report = check_userbuffers(
        used.ub_cfgs,
        transformer_engine=question.transformer_engine,
        tensor_model_parallel_size=_ASSUMED_TP if tp is None else tp,
        tokens=used.tokens,
        hidden_size=used.hidden_size,
        quantization_modes=modes,
        flags=LayerFlags(
            tp_comm_overlap_rs_dgrad=question.tp_comm_overlap_rs_dgrad or configuration.tp_comm_overlap_rs_dgrad
        ),
    )
    return Answer(
        configuration=used,
        report=report,
        transformer_engine=question.transformer_engine,
        tensor_model_parallel_size=_ASSUMED_TP if tp is None else tp,
        assumed_tp=tp is None,
        quantization_modes=modes,
    )


def _modes(configuration: Configuration) -> tuple[str, ...]:
    """A list of two has one configuration for FP8 GEMMs and one for BF16."""
    if isinstance(configuration.ub_cfgs, list) and len(configuration.ub_cfgs) == 2:
        return ("fp8", "none")
    return ("fp8",) if configuration.precision == "fp8" else ("none",)
