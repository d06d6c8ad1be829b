"""UB: whether every microbatch fills the userbuffers exactly."""

from __future__ import annotations

from collections.abc import Iterator

from overlapkit.facts import Facts
from overlapkit.presets.of_recipe import layer_flags
from overlapkit.rules.changes import home
from overlapkit.rules.registry import TRANSFORMER_ENGINE, Finding, State, rule
from overlapkit.rules.tp import OVERLAP, obstacle, off
from overlapkit.userbuffers.buffers import NONE
from overlapkit.userbuffers.layers import RING

# Dataset classes of Bridge that yield samples of different lengths unless they are padded.
_TEXT_SFT = ("FinetuningDatasetConfig", "HFDatasetConfig", "GPTSFTDatasetConfig")  # padded by dataset_kwargs
_DIRECT_SFT = ("DirectHFSFTDatasetConfig", "EnergonDatasetConfig")  # from 0.6, padded by their own field
_CONVERSATIONS = ("HFDatasetConversationProvider", "PreloadedVLMConversationProvider")  # up to 0.5


@rule("UB023", source="transformer-engine common/comm_gemm_overlap/comm_gemm_overlap.cpp")
def tokens_not_divisible(f: Facts, s: State) -> Finding:
    """The tokens of a microbatch do not split over the TP group.

    ``seq_length * micro_batch_size / context_parallel_size`` must be a multiple of TP.

    Why: a userbuffer of [tokens, hidden] is cut into TP chunks.
    Fix: change the sequence length, the microbatch or TP.
    """
    tokens, tp = f.tokens_per_rank, f.parallelism.tp
    if not s[OVERLAP] or tokens is None or tokens % tp == 0:
        return None
    return obstacle(
        f,
        f"{_shape(f)} does not split into TP {tp} chunks",
        fix=f"set model.seq_length so that seq_length * micro_batch_size / CP is a multiple of TP, or {off(f)}",
        by=TRANSFORMER_ENGINE,
        at="first_forward",
    )


def _shape(f: Facts) -> str:
    """The userbuffer's shape in words."""
    tokens, hidden = f.tokens_per_rank, f.recipe.model.hidden_size
    rows = "seq_length · micro_batch_size / CP" if tokens is None else f"{tokens} tokens"
    return f"a buffer of [{rows}, {'hidden_size' if hidden is None else hidden}]"


@rule(
    "UB024",
    source="transformer-engine pytorch/csrc/extensions/comm_gemm_overlap.cpp; megatron-bridge training/config.py, "
    "training/vlm_step.py and data/datasets",
)
def token_count_varies(f: Facts, s: State) -> Finding:
    """The number of tokens differs between microbatches.

    Variable sequence lengths, packing or fine-tuning samples without padding to a constant length, or another
    microbatch size in evaluation. Bridge pads the samples of its multimodal datasets itself with PP above 1,
    from 0.5 with EP above 1 too; text fine-tuning and packed sequences never.

    Why: the userbuffer is allocated once, as [seq_length * micro_batch_size / CP, hidden], and every
    microbatch must fill it exactly; the first that does not raises.
    Fix: pad every microbatch to one length that TP divides, or turn TP overlap off.
    """
    if not s[OVERLAP]:
        return None
    found = _varies(f) or _evaluation_differs(f)
    if found is None:
        return None
    reason, fix = found
    if fix and _varies(f) and (second := _evaluation_differs(f)):
        fix = f"{fix} and {second[1].removeprefix('set ')}"
    return obstacle(
        f,
        f"{reason}, and {_shape(f)} must be filled exactly",
        fix=f"{fix}, or {home(f)}.tp_comm_overlap=false" if fix else off(f),
        by=TRANSFORMER_ENGINE,
        at="first_forward",
    )


def _varies(f: Facts) -> tuple[str, str | None] | None:
    """Why the token count of training is not constant and how to mend it; None when nothing says so."""
    data, pad = f.recipe.dataset, "set dataset.dataset_kwargs.pad_to_max_length=true"
    if f.recipe.model.variable_seq_lengths:
        return "variable_seq_lengths is true", "pad to a constant length and set model.variable_seq_lengths=false"
    if data.pack_sequences_in_batch or data.enable_in_batch_packing:
        return "sequences are packed within the batch", "pad each sample to one length instead of packing"
    specs = data.packed_sequence_specs if data.packed_sequence_specs is not None else data.offline_packing_specs
    if specs is not None or data.enable_offline_packing:
        if not _padded(f):
            return "packed sequences are not padded to the maximum", pad
        return _packed_to_another_length(f, specs)
    if data.kind in _TEXT_SFT and not _padded(f):
        return "the samples of fine-tuning are not padded to the maximum", pad
    if data.kind in _DIRECT_SFT and not _padded(f) and not _padded_by_bridge(f):
        return "the samples of fine-tuning are not padded to the maximum", "set dataset.pad_to_max_length=true"
    if data.kind in _CONVERSATIONS and not _padded_by_bridge(f):
        return "the samples of fine-tuning are padded to a multiple of 128 only", None
    return None


def _padded(f: Facts) -> bool:
    data = f.recipe.dataset
    kwargs = data.dataset_kwargs if isinstance(data.dataset_kwargs, dict) else {}
    return bool(data.pad_to_max_length) or kwargs.get("pad_to_max_length") is True


def _padded_by_bridge(f: Facts) -> bool:
    """Whether Bridge pads multimodal samples to ``seq_length`` because stages or experts want fixed shapes."""
    return f.parallelism.pp > 1 or (f.parallelism.ep > 1 and f.bridge_in(">=0.5.0"))


def _packed_to_another_length(f: Facts, specs: object) -> tuple[str, str] | None:
    packed = specs.get("packed_sequence_size") if isinstance(specs, dict) else None
    length = f.recipe.model.seq_length
    if not isinstance(packed, int) or packed <= 0 or length is None or packed == length:
        return None
    dataset = "" if f.recipe.dataset.seq_length is None else f" and dataset.seq_length={packed}"  # CFG007
    fix = f"set model.seq_length={packed}{dataset}"
    return f"packed sequences have {packed} tokens where seq_length is {length}", fix


def _evaluation_differs(f: Facts) -> tuple[str, str] | None:
    micro, evaluated = f.recipe.train.micro_batch_size, f.recipe.validation.eval_micro_batch_size
    if micro is None or evaluated is None or micro == evaluated or f.recipe.validation.eval_iters == 0:
        return None
    reason = f"evaluation runs microbatches of {evaluated}, training of {micro}"
    return reason, f"set validation.eval_micro_batch_size={micro}"


@rule(
    "UB025",
    source="transformer-engine pytorch/module/base.py; common/comm_gemm_overlap/comm_gemm_overlap.cpp get_tensor_chunk",
    te=">=2.4",
)
def mxfp8_blocks(f: Facts, s: State) -> Finding:
    """MXFP8 userbuffers need dimensions in multiples of 128.

    The hidden size, the tokens of a TP chunk, the columns of each of the ``num_splits`` pieces of a pipelined
    reduce-scatter, and what TP leaves of the attention's and the MLP's width, which row-parallel GEMMs sum over.

    Why: an MXFP8 tensor has scales that are padded to blocks, and a chunk must hold whole blocks.
    Fix: choose sizes that 128 divides, or turn TP overlap off.
    """
    if not s[OVERLAP] or f.precision.fp8_recipe != "mxfp8" or f.parallelism.tp == 1:
        return None
    wrong = list(_not_in_blocks(f))
    if not wrong:
        return None
    because = f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not a multiple of 128"
    return obstacle(f, because, by=TRANSFORMER_ENGINE, at="first_forward")


def _not_in_blocks(f: Facts) -> Iterator[str]:
    hidden, tokens, tp = f.recipe.model.hidden_size, f.tokens_per_rank, f.parallelism.tp
    if hidden is not None and hidden % 128:
        yield f"hidden_size {hidden}"
    if tokens is not None and tokens % tp == 0 and (tokens // tp) % 128:
        yield f"{tokens // tp} tokens of a TP chunk"
    if hidden is not None and hidden % 128 == 0:
        yield from (f"{hidden / splits:g} columns of a piece of {layer}" for layer, splits in _splits(f, hidden))
    yield from (
        f"{width / tp:g} columns of {layer}'s input" for layer, width in _row_parallel_widths(f) if width % (128 * tp)
    )


def _splits(f: Facts, hidden: int) -> Iterator[tuple[str, int]]:
    """Layer -> num_splits, where these leave no whole blocks of the hidden size."""
    report, flags = f.userbuffers_report, layer_flags(f.recipe)
    for name, buffer in (report.buffers if report else {}).items():
        layer, _, mode = name.partition("@")
        splits = buffer["num_splits"]
        if (
            mode != NONE
            and flags.reduces(layer)
            and buffer["method"] != RING
            and splits > 0
            and hidden % (128 * splits)
        ):
            yield layer, splits


def _row_parallel_widths(f: Facts) -> Iterator[tuple[str, int]]:
    """The input widths of the linears whose output is reduced, before TP divides them, as far as the recipe says."""
    model = f.recipe.model
    if model.tp_comm_overlap_rs is False or model.multi_latent_attention:
        return
    if model.num_attention_heads and model.kv_channels:
        yield "proj_fprop", model.num_attention_heads * model.kv_channels
    if model.ffn_hidden_size and not model.num_moe_experts:
        yield "fc2_fprop", model.ffn_hidden_size
