"""Which layers a stage holds, which parameters a rank, and which buckets DDP lays them out in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from volume_recipes import MOE, small

import overlapkit
from overlapkit.facts import Facts, derive
from overlapkit.recipe import Recipe
from overlapkit.resolver import plan
from overlapkit.volume.model import Model, ffn_width, model_of, padded_vocabulary
from overlapkit.volume.parameters import Parameters, blocks_of, buckets_of, parameters_of
from overlapkit.volume.stages import stage_chunks

MATRIX = 512 // 2 * 64  # the embedding on one of two TP ranks


def facts_of(pp: int = 1, **model: Any) -> Facts:
    return derive(small(cluster={"num_gpus": 4 * pp}, model={"pipeline_model_parallel_size": pp, **model}))


def built(recipe: Recipe) -> tuple[Model, Parameters]:
    facts = derive(recipe)
    model = model_of(facts, plan(facts))
    return model, parameters_of(model)


def buckets(recipe: Recipe, bucket_size: int | None, stage: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    model, found = built(recipe)
    return tuple(buckets_of(model, found, model.stages[stage][0], bucket_size))  # type: ignore[return-value]


# --- layers per stage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "model", "layers"),
    [
        (1, {}, [[4]]),
        (2, {}, [[2], [2]]),
        (2, {"num_layers": 8, "virtual_pipeline_model_parallel_size": 2}, [[2, 2], [2, 2]]),
        (4, {"num_layers": 7, "num_layers_in_first_pipeline_stage": 1}, [[1], [2], [2], [2]]),
        (
            4,
            {"num_layers": 7, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
            [[1], [2], [2], [2]],
        ),
        (2, {"num_layers": 5, "num_layers_in_last_pipeline_stage": 2}, [[3], [2]]),
        (
            2,
            {
                "num_layers": 6,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            [[3], [3]],
        ),
        (2, {"num_layers": 5, "pipeline_model_parallel_layout": "Et|tt|t|tL"}, [[1, 1], [2, 1]]),
        (2, {"num_layers": 5, "pipeline_model_parallel_layout": "E|ttt|tt|L"}, [[0, 2], [3, 0]]),
    ],
)
def test_layers_of_each_stage_and_chunk(pp: int, model: dict[str, Any], layers: list[list[int]]) -> None:
    stages = stage_chunks(facts_of(pp, **model))
    assert [[len(chunk.moe) for chunk in chunks] for chunks in stages] == layers
    ends = [(chunk.embedding, chunk.output) for chunks in stages for chunk in chunks]
    assert ends[0][0] and ends[-1][1]
    assert sum(first for first, _ in ends) == sum(last for _, last in ends) == 1


@pytest.mark.parametrize(
    ("frequency", "second_stage"),
    [(None, (True, True)), (2, (True, False)), ([0, 0, 1, 1], (True, True)), ([1, 1, 0, 1], (False, True))],
)
def test_which_layers_have_experts(frequency: Any, second_stage: tuple[bool, ...]) -> None:
    (_, (chunk,)) = stage_chunks(facts_of(2, **MOE, moe_layer_freq=frequency))
    assert (chunk.first, chunk.moe) == (2, second_stage)


# --- sizes that are not written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "pads", "multiple", "size"),
    [
        ("megatron-lm", None, None, 768),  # to 128 times TP
        ("megatron-lm", False, None, 514),
        ("megatron-lm", None, 2, 516),
        ("megatron-bridge", None, None, 514),
        ("megatron-bridge", True, None, 768),
    ],
)
def test_padding_of_the_vocabulary(framework: str, pads: bool | None, multiple: int | None, size: int) -> None:
    sizes = {"vocab_size": 514, "should_pad_vocab": pads, "make_vocab_size_divisible_by": multiple}
    assert padded_vocabulary(derive(small(software={"framework": framework}, model=sizes))) == size


def test_width_of_an_mlp_that_is_not_written() -> None:
    absent = {"ffn_hidden_size": None, "hidden_size": 1024, "num_attention_heads": 8}
    assert ffn_width(derive(small(model=absent))) == 4096
    assert ffn_width(derive(small(software={"framework": "megatron-lm"}, model=absent))) == 2688


# --- parameters and buckets ------------------------------------------------------------


def test_parameters_of_a_layer_in_the_order_of_its_modules() -> None:
    """Transformer Engine's norms are part of the projection behind them; Megatron-Core's own stand before."""
    norm, proj, qkv, fc1, fc2 = 64, 64 // 2 * 64, 3 * 64 // 2 * 64, 2 * 128 // 2 * 64, 128 // 2 * 64

    def order(**model: Any) -> list[int]:
        return [each.elements for each in built(small(model=model))[1].dense_layer.parameters]

    assert order() == [proj, norm, qkv, norm, fc1, fc2]
    assert order(transformer_impl="local") == [norm, proj, qkv, norm, fc1, fc2]
    assert order(add_bias_linear=True) == [proj, 64, norm, qkv, 96, norm, fc1, 128, fc2, 64]
    assert order(normalization="LayerNorm", qk_layernorm=True) == [
        proj,
        *[norm] * 2,
        qkv,
        *[8] * 4,
        *[norm] * 2,
        fc1,
        fc2,
    ]


def test_parameters_of_experts_in_the_order_of_their_modules() -> None:
    first, second, router = 2 * 96 * 64, 96 * 64, 8 * 64

    def experts(**model: Any) -> list[int]:
        found = built(small(model={**MOE, **model}))[1].moe_layer.parameters
        return [each.elements for each in found[found.index(next(p for p in found if p.elements == router)) :]]

    assert experts() == [router, *[first, second] * 4]
    assert experts(moe_grouped_gemm=True) == [router, *[first] * 4, *[second] * 4]
    assert experts(moe_grouped_gemm=True, transformer_impl="local") == [router, 4 * first, 4 * second]
    shared = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True}
    assert experts(**shared)[-3:] == [64, 64 * 64, 64 // 2 * 64]


def test_gradients_of_experts_are_apart_with_ep_alone_before_core_0_19() -> None:
    def apart(core: str, **model: Any) -> bool:
        software = {"megatron_core": core}
        return built(small(software=software, model={**MOE, **model}))[0].expert_parameters_apart

    only_etp = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    assert apart("0.16.1") and apart("0.19.2")
    assert not apart("0.16.1", **only_etp)
    assert apart("0.19.2", **only_etp)
    assert not apart("0.19.2", expert_model_parallel_size=1, expert_tensor_parallel_size=2)


def test_one_bucket_is_padded_at_its_end_only_with_the_distributed_optimizer() -> None:
    recipe = small()
    model, found = built(recipe)
    held = sum(count * block.plain[0] for count, block in blocks_of(found, model.stages[0][0]))
    assert held % 128 == 64
    assert buckets(recipe, None) == ((held + 64,), ())
    odd = small(model={"qk_layernorm": True})
    model, found = built(odd)
    held = sum(count * block.plain[0] for count, block in blocks_of(found, model.stages[0][0]))
    # Each of the eight QK norms of 8 elements takes the place of 64, and the bucket ends at a multiple of 128.
    padded = held + 8 * 56
    assert buckets(odd, None) == ((padded + -padded % 128,), ())
    assert buckets(small(model={"qk_layernorm": True}, ddp={"use_distributed_optimizer": False}), None) == ((held,), ())


@pytest.mark.parametrize(("ranks", "multiple"), [(2, 128), (3, 384), (5, 640)])
def test_a_bucket_ends_where_its_ranks_can_share_it(ranks: int, multiple: int) -> None:
    recipe = small(cluster={"num_gpus": 2 * ranks}, train={"global_batch_size": 2 * ranks})
    assert all(size % multiple == 0 for size in buckets(recipe, 10_000)[0])
    assert all(size % 2**16 == 0 for size in buckets(small(ddp={"pad_buckets_for_high_nccl_busbw": True}), 10_000)[0])


def test_a_matrix_of_two_stages_has_a_bucket_of_its_own() -> None:
    tied = {"share_embeddings_and_output_weights": True}
    recipe = small(cluster={"num_gpus": 8}, model={**tied, "pipeline_model_parallel_size": 2})
    assert buckets(recipe, None, stage=0)[0][-1] == MATRIX
    assert MATRIX in buckets(recipe, None, stage=1)[0]
    assert buckets(recipe, 10_000_000, stage=1)[0][0] == MATRIX  # from the last parameter on
    assert len(buckets(small(model=tied), None)[0]) == 1  # one stage has it once


def test_num_buckets_divides_what_the_rank_holds() -> None:
    def reduces(**ddp: Any) -> int:
        recipe = small(software={"framework": "megatron-lm"}, ddp={"overlap_grad_reduce": True, **ddp})
        rows = overlapkit.volume(recipe).stages[0].rows
        return next(row.count for row in rows if (row.axis, row.op) == ("dp", "reduce_scatter"))

    assert reduces() == 1
    assert reduces(num_buckets=3) == 3


@given(st.integers(1, 60_000), st.booleans(), st.booleans())
def test_buckets_hold_every_parameter_whatever_their_size(size: int, moe: bool, dist_opt: bool) -> None:
    recipe = small(model=MOE if moe else {}, ddp={"use_distributed_optimizer": dist_opt})
    model, found = built(recipe)
    whole, cut = buckets(recipe, None), buckets(recipe, size)
    for part, (one, many) in enumerate(zip(whole, cut, strict=True)):
        held = sum(count * block.plain[part] for count, block in blocks_of(found, model.stages[0][0]))
        assert sum(one) >= held and sum(many) >= held
        if not dist_opt:
            assert sum(one) == sum(many) == held
        assert all(bucket >= size for bucket in many[:-1])
        assert len(many) <= max(1, -(-held // size))
