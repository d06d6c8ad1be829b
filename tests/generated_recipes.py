"""Recipes as hypothesis draws them, for the tests that write a plan and read it back."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from overlapkit.precision import named_precisions
from overlapkit.presets import load_preset, preset_names

BRIDGES = ("0.2.0", "0.3.0", "0.3.1", "0.4.0", "0.5.0", "0.5.1", "0.6.0", "0.6.2")
CORES = ("0.12.0", "0.14.0", "0.16.1", "0.18.2", "0.19.2", "0.20.0")
flags = st.booleans()
maybe = st.sampled_from([None, True, False])
# Text that breaks out of whatever is careless with it.
HOSTILE = (
    *(
        "a b",
        "it's",
        'say "x"',
        "a,b",
        "{a: 1}",
        "[1",
        "$HOME",
        "$(id)",
        "`id`",
        "${x}",
        r"\${x}",
        "\\\\${a}\\",
        "a\nb",
    ),
    *(
        "~x",
        "+x",
        "null",
        "True",
        "1e3",
        "0x1",
        "",
        " ",
        "é☃",
        "'''",
        '"""',
        "\\",
        "\\'",
        '\\"',
        "a\\\nb",
        "#c",
        "a: b",
    ),
    *("!!python/object:os.system", "???", "@file", "%s", "{}", "*", ");import os", "\t", "\x1b[2J", "…", "=", "a=b"),
)
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12))
plain_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), flags, st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def userbuffers() -> st.SearchStrategy[Any]:
    """auto, none, a name, a preset's content, one that leaves options out, one that Bridge's classes cannot hold."""
    contents = [
        {layer: dict(entry) for layer, entry in load_preset(name).userbuffers.items()} for name in preset_names()
    ]
    partial = {
        "qkv_fprop": {"method": "ring_exchange"},
        "proj_fprop": {"method": "pipeline", "num_sm": 8},
        "fc1_dgrad": {},
    }
    foreign = {"qkv_fprop": {"method": "ring_exchange", "use_ce": 0}, "fc2_fprop": {"method": "unheard_of"}}
    whole = [None, "auto", partial, foreign, "not/here.yaml", {}]
    return st.one_of(st.sampled_from(whole), st.sampled_from(preset_names()), st.sampled_from(contents))


def _comm_overlap() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        _optional(
            tp_comm_overlap=st.sampled_from(["auto", True, False, None]),
            tp_comm_overlap_cfg=userbuffers(),
            tp_comm_bootstrap_backend=st.sampled_from([None, "nccl", "gloo", "mpi"]),
            overlap_p2p_comm=maybe,
            batch_p2p_comm=maybe,
            overlap_grad_reduce=maybe,
            overlap_param_gather=maybe,
            overlap_param_gather_with_optimizer_step=maybe,
            align_param_gather=maybe,
            bucket_size=st.sampled_from([None, 0, 40_000_000]),
            defer_embedding_wgrad_compute=maybe,
            wgrad_deferral_limit=st.sampled_from([None, -1, 0, 50]),
            overlap_moe_expert_parallel_comm=maybe,
            delay_wgrad_compute=maybe,
        ),
    )


def _ddp() -> st.SearchStrategy[dict[str, Any]]:
    return _optional(
        use_distributed_optimizer=maybe,
        overlap_grad_reduce=maybe,
        overlap_param_gather=maybe,
        align_param_gather=maybe,
        bucket_size=st.sampled_from([None, 10_000_000]),
        num_buckets=st.sampled_from([None, 4]),
        delay_wgrad_compute=maybe,
        grad_reduce_in_fp32=maybe,
        use_megatron_fsdp=maybe,
        nccl_ub=maybe,
    )


def _mixed_precision() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.sampled_from(named_precisions()),
        _optional(
            bf16=flags,
            fp8=st.sampled_from([None, "hybrid", "e4m3"]),
            fp8_recipe=st.sampled_from(["tensorwise", "delayed", "mxfp8", "blockwise"]),
            fp4=st.sampled_from([None, "e2m1"]),
            grad_reduce_in_fp32=flags,
            first_last_layers_bf16=flags,
            num_layers_at_start_in_bf16=st.integers(0, 2),
            fp8_param_gather=flags,
        ),
    )


def _model() -> st.SearchStrategy[dict[str, Any]]:
    return _optional(
        hidden_size=st.sampled_from([4096, 8192, 12288, 16384]),
        seq_length=st.sampled_from([2048, 4096, 8192]),
        num_layers=st.sampled_from([32, 80]),
        num_attention_heads=st.just(32),
        vocab_size=st.just(32000),
        sequence_parallel=maybe,
        expert_tensor_parallel_size=st.sampled_from([None, 1, 2]),
        num_moe_experts=st.sampled_from([None, 8, 64]),
        moe_token_dispatcher_type=st.sampled_from([None, "alltoall", "allgather", "flex"]),
        cp_comm_type=st.sampled_from([None, "p2p", ["a2a"], ["p2p", "a2a"]]),
        pipeline_model_parallel_layout=st.sampled_from([None, "Et*2|t*2|t*2|t*2L"]),
        recompute_modules=st.sampled_from([None, ["core_attn", "moe_act"]]),
        cuda_graph_scope=st.sampled_from([None, ["attn"], "attn,moe_router"]),
        gradient_accumulation_fusion=maybe,
        bf16=maybe,
        fp8=st.sampled_from([None, "hybrid"]),
        fp8_recipe=st.sampled_from([None, "delayed", "mxfp8"]),
        tp_comm_overlap=maybe,
        tp_comm_overlap_cfg=userbuffers(),
        tp_comm_bootstrap_backend=st.sampled_from([None, "gloo"]),
        tp_comm_overlap_rs_dgrad=maybe,
        overlap_p2p_comm=maybe,
        batch_p2p_comm=maybe,
        defer_embedding_wgrad_compute=maybe,
        wgrad_deferral_limit=st.sampled_from([None, 0, 3]),
        overlap_moe_expert_parallel_comm=maybe,
        delay_wgrad_compute=maybe,
    )


@st.composite
def recipes(draw: st.DrawFn, framework: str | None = None) -> dict[str, Any]:
    """A recipe that can be resolved, as a mapping; what it asks for need not be wise."""
    framework = framework or draw(st.sampled_from(["megatron-bridge", "megatron-lm"]))
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    cp, dp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    model = draw(_model()) | {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    model |= {
        "context_parallel_size": cp,
        "virtual_pipeline_model_parallel_size": draw(st.sampled_from([None, 1, 2, 3])),
        "expert_model_parallel_size": draw(st.sampled_from([None, 1, 2, 4])),
    }
    software = {"framework": framework}
    if framework == "megatron-bridge":
        software["megatron_bridge"] = draw(st.sampled_from(BRIDGES))
    else:
        software["megatron_core"] = draw(st.sampled_from(CORES))
    recipe = {
        "cluster": {"gpu": draw(st.sampled_from(["h100", "b200", "a100", "h20"])), "num_gpus": tp * pp * cp * dp},
        "software": software,
        "model": model,
        "train": draw(_optional(micro_batch_size=st.sampled_from([1, 2]), global_batch_size=st.just(64))),
        "ddp": draw(_ddp()),
        "optimizer": draw(
            _optional(
                use_distributed_optimizer=maybe,
                overlap_param_gather=maybe,
                overlap_param_gather_with_optimizer_step=maybe,
            )
        ),
        "dist": draw(_optional(use_megatron_fsdp=maybe, use_torch_fsdp2=maybe)),
        "peft": draw(st.sampled_from([None, "lora"])),
    }
    for name, values in (("comm_overlap", _comm_overlap()), ("mixed_precision", _mixed_precision())):
        if draw(flags):
            recipe[name] = draw(values)
    return recipe


@st.composite
def hostile_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe with hostile text in every field that takes text."""
    recipe = draw(recipes())
    recipe["checkpoint"] = {"save": draw(texts), "load": draw(texts), "ckpt_format": draw(texts)}
    recipe["optimizer"] = {**recipe["optimizer"], "optimizer": draw(texts)}
    recipe["ddp"] = {**recipe["ddp"], "data_parallel_sharding_strategy": draw(texts)}
    recipe["dataset"] = {"dataset_kwargs": draw(plain_values), "packed_sequence_specs": draw(plain_values)}
    recipe["env_vars"] = draw(st.dictionaries(texts.filter(bool), texts, max_size=3))
    recipe["model"] = {**recipe["model"], "transformer_impl": draw(texts), "moe_layer_freq": draw(plain_values)}
    if draw(flags):
        layers = st.dictionaries(texts, st.dictionaries(texts, texts, max_size=2), max_size=3)
        recipe["comm_overlap"] = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": draw(layers)}
        recipe["comm_overlap"]["tp_comm_bootstrap_backend"] = draw(texts)
        recipe["model"] |= {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 1,
            "sequence_parallel": True,
        }
        recipe["cluster"]["num_gpus"] = 16
    return recipe
