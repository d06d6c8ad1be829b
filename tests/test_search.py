"""A search: which layouts there are, which of them the rules refuse, and that shared work changes no answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from overlapkit.cost.estimate import estimate_of
from overlapkit.cost.memory import capacity_of, memory_of, most_allowed
from overlapkit.errors import RecipeError
from overlapkit.facts import derive
from overlapkit.recipe import load_recipe, recipe_from_mapping
from overlapkit.resolver import plan
from overlapkit.search.changes import balanced_stages, changed, changed_mapping, changes_of
from overlapkit.search.feasible import Rules
from overlapkit.search.find import NothingFound, read_source, search
from overlapkit.search.judge import Judge
from overlapkit.search.ranges import recomputes_of, sizes_of, space_of
from overlapkit.search.ranking import Candidate, Ranking
from overlapkit.search.result import Search
from overlapkit.search.space import Layout, Overlaps, Point, Space, overlaps_of
from overlapkit.search.work import judged
from overlapkit.volume.predict import predict

ROOT = Path(__file__).parent.parent
LLAMA, MIXTRAL, MEGATRON_LM, FSDP = (
    ROOT / "recipes" / f"{name}.yaml"
    for name in ("llama3_70b_64xh100", "mixtral_8x7b_h100", "llama2_7b_32xh20", "llama3_8b_fsdp_8xh100")
)
ALL_OFF = Overlaps(*[False] * 6)


def quiet(*_: Any) -> None:
    """No progress."""


def found(path: Path, top: int = 5, **ranges: str) -> Search:
    return search(read_source(path), ranges, top=top, workers=1, report=quiet)


# --- the space -----------------------------------------------------------------------------------


def test_points_are_numbered_and_leave_out_virtual_stages_without_a_pipeline() -> None:
    space = Space(gpus=(8,), tp=(1, 2), pp=(1, 2), cp=(1,), ep=(1,), vp=(1, 2), micro_batch_size=(1, 2))
    points = list(space.points(0, space.size))
    assert space.size == 16 and len(points) == 12
    assert [*space.points(0, 5), *space.points(5, 16)] == points
    assert all(point.pp > 1 or point.vp == 1 for point in points)


def test_a_range_of_a_million_layouts_takes_no_memory() -> None:
    sizes = tuple(range(1, 1001))
    space = Space(gpus=sizes, tp=sizes, pp=sizes, cp=sizes, ep=(1,), vp=(1,), micro_batch_size=sizes)
    assert space.size == 10**15
    assert next(space.points(space.size - 1, space.size)) == Point(1000, 1000, 1000, 1000, 1, 1, 1000)


def test_overlaps_of_a_dense_pipeline_are_twelve_and_depend_on_one_another() -> None:
    every = overlaps_of(Point(64, 4, 4, 1, 1, 2, 1))
    assert len(every) == 2 * 3 * 2 == len(set(every))
    assert all(each.overlap_grad_reduce for each in every if each.overlap_param_gather)
    assert len(overlaps_of(Point(64, 1, 1, 1, 1, 1, 1))) == 3
    assert len(overlaps_of(Point(64, 4, 4, 1, 8, 2, 1))) == 36


@pytest.mark.parametrize(
    ("text", "sizes"), [("1,2,4", (1, 2, 4)), ("1-4", (1, 2, 3, 4)), ("8,1-2, 2", (1, 2, 8)), ("64", (64,))]
)
def test_a_range_is_sizes_or_from_and_to(text: str, sizes: tuple[int, ...]) -> None:
    assert sizes_of(text, "--tp") == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "1,", "four", "1..4", "4-2", "1-100000", "99999999999", "1.5", "²"])
def test_any_other_text_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^--tp: ") as refused:
        sizes_of(text, "--tp")
    assert "\n" not in str(refused.value)


def test_recomputation_is_named_by_its_granularity() -> None:
    assert recomputes_of("full,none") == ("full", "none")
    with pytest.raises(RecipeError, match="'some' is no kind of recomputation"):
        recomputes_of("none,some")


def test_a_dense_model_has_no_experts_to_spread() -> None:
    with pytest.raises(RecipeError, match="--ep: the model has no experts"):
        space_of(derive(load_recipe(LLAMA)), {"ep": "1,2"})


@pytest.mark.parametrize("path", [LLAMA, MIXTRAL, MEGATRON_LM], ids=lambda path: path.stem)
def test_the_usual_ranges_hold_the_recipes_own_layout(path: Path) -> None:
    facts = derive(load_recipe(path))
    mesh, space = facts.parallelism, space_of(facts, {})
    assert mesh.world_size in space.gpus and mesh.tp in space.tp and mesh.pp in space.pp
    assert mesh.cp in space.cp and mesh.ep in space.ep and (mesh.vp or 1) in space.vp


# --- the rules -----------------------------------------------------------------------------------


SIZES: dict[Path, dict[str, str]] = {
    LLAMA: {"tp": "1,4,8,16", "pp": "1,2,3,4", "vp": "1,3,5", "cp": "1,2", "micro_batch_size": "1,3"},
    MIXTRAL: {"tp": "1,2", "pp": "1,2,4", "vp": "1,4", "cp": "1", "ep": "1,3,8", "micro_batch_size": "1,2"},
    MEGATRON_LM: {"tp": "1,3,8", "pp": "1,2,4", "vp": "1,2,4", "cp": "1,2", "micro_batch_size": "1,4"},
    FSDP: {"tp": "1,2,16", "pp": "1,2", "vp": "1", "cp": "1,2", "micro_batch_size": "1,2,4"},
}


@lru_cache(maxsize=8)
def rules_of(path: Path) -> Rules:
    return Rules(load_recipe(path))


@st.composite
def layouts(draw: Any) -> tuple[Path, Layout, Overlaps]:
    path = draw(st.sampled_from(sorted(SIZES)))
    space = space_of(rules_of(path).facts, SIZES[path])
    index = draw(st.integers(0, space.size - 1))
    points = list(space.points(index, space.size)) if index > space.size - 8 else list(space.points(index, index + 8))
    point = draw(st.sampled_from(points or [next(space.points(0, space.size))]))
    layout = draw(st.sampled_from(list(space.layouts(point))))
    return path, layout, draw(st.sampled_from(overlaps_of(point)))


def verdict(rules: Rules, layout: Layout, overlaps: Overlaps) -> bool:
    """Whether the search takes the layout for legal."""
    if rules.refused(layout.point) or rules.uncounted(layout):
        return False
    return overlaps in rules.allowed(layout).overlaps


def truth(rules: Rules, layout: Layout, overlaps: Overlaps) -> bool:
    """Whether all rules together do, and decide the overlaps as they are asked for."""
    facts = rules.facts
    try:
        own = derive(changed(facts.recipe, changes_of(facts, layout, overlaps)))
        decided = plan(own)
        predict(own, decided, approximate=True)
    except RecipeError:
        return False
    asked = {
        "model.tp_comm_overlap": overlaps.tp_comm_overlap,
        "ddp.overlap_grad_reduce": overlaps.overlap_grad_reduce,
        "ddp.overlap_param_gather": overlaps.overlap_param_gather,
        "model.overlap_p2p_comm": overlaps.overlap_p2p_comm,
        "model.overlap_moe_expert_parallel_comm": overlaps.overlap_moe_expert_parallel_comm,
        "model.delay_wgrad_compute": overlaps.delay_wgrad_compute,
    }
    return decided.ok and all(bool(decided.settings[name]) is value for name, value in asked.items())


@given(layouts())
def test_asking_the_rules_once_per_kind_answers_as_all_rules_do(drawn: tuple[Path, Layout, Overlaps]) -> None:
    path, layout, overlaps = drawn
    assert verdict(rules_of(path), layout, overlaps) is truth(rules_of(path), layout, overlaps)


def test_a_kind_is_not_given_up_for_one_layouts_sake() -> None:
    """Every kind that has a legal layout is allowed, whatever layout of it came first."""
    backwards = Rules(load_recipe(MIXTRAL))
    space = space_of(backwards.facts, SIZES[MIXTRAL])
    every = [layout for point in space.points(0, space.size) for layout in space.layouts(point)]
    for layout in reversed(every):
        if not (backwards.refused(layout.point) or backwards.uncounted(layout)):
            backwards.allowed(layout)
    for layout in every[::7]:
        for overlaps in overlaps_of(layout.point)[::5]:
            assert verdict(backwards, layout, overlaps) is verdict(rules_of(MIXTRAL), layout, overlaps)


# --- time and memory -----------------------------------------------------------------------------


@lru_cache(maxsize=8)
def judged_of(path: Path) -> Ranking:
    recipe = load_recipe(path)
    space = space_of(derive(recipe), SIZES[path])
    return Judge(recipe, space, 10_000).judge(0, space.size)


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.stem)
def test_shared_work_gives_the_estimate_of_each_layout(path: Path) -> None:
    facts, ranking = derive(load_recipe(path)), judged_of(path)
    assert len(ranking.best) > 20
    for candidate in ranking.best[:: len(ranking.best) // 20]:
        own = derive(changed(facts.recipe, changes_of(facts, candidate.layout, candidate.overlaps)))
        decided = plan(own)
        volume = predict(own, decided, approximate=True)
        assert estimate_of(own, decided, volume).step_time_s == approx(candidate.seconds, rel=1e-4)
        assert memory_of(own, decided, volume).total == approx(candidate.memory, rel=1e-9)


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.stem)
def test_every_layout_is_counted_once(path: Path) -> None:
    space, ranking = space_of(derive(load_recipe(path)), SIZES[path]), judged_of(path)
    every = sum(len(overlaps_of(point)) for point in space.points(0, space.size) for _ in space.layouts(point))
    assert ranking.judged == every
    assert min(ranking.ranked, ranking.refused.total(), ranking.too_large.total()) > 0
    assert ranking.points == space.size


def test_what_compute_alone_makes_too_slow_is_not_looked_at_further_and_changes_nothing() -> None:
    recipe = load_recipe(MIXTRAL)
    judge = Judge(recipe, space_of(derive(recipe), SIZES[MIXTRAL]), 5)
    few = judge.judge(0, 1_000)
    assert few.best == judged_of(MIXTRAL).best[:5]
    assert few.front == judged_of(MIXTRAL).front
    assert few.ranked == judged_of(MIXTRAL).ranked


def test_a_layout_stands_once_with_the_overlaps_that_are_best_for_it() -> None:
    best = judged_of(LLAMA).best
    assert len({candidate.layout for candidate in best}) == len(best)
    assert best == sorted(best)


def test_parts_of_the_space_come_to_the_same_as_the_whole() -> None:
    recipe = load_recipe(MIXTRAL)
    space = space_of(derive(recipe), SIZES[MIXTRAL])
    judge, parts = Judge(recipe, space, 10_000), Ranking(10_000)
    for start in range(0, space.size, 11):
        parts.add(judge.judge(start, start + 11))
    assert parts == judged_of(MIXTRAL)


def test_several_processes_come_to_the_same_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlapkit.search.work._ALONE", 1)
    recipe = load_recipe(MIXTRAL)
    space = space_of(derive(recipe), {**SIZES[MIXTRAL], "tp": "1", "pp": "4"})
    one, _ = judged(recipe, space, keep=20, workers=1, report=quiet)
    judge = Judge.judge

    def slow(self: Judge, start: int, stop: int) -> Ranking:
        time.sleep(0.5)  # the first process leaves something to the others
        return judge(self, start, stop)

    monkeypatch.setattr(Judge, "judge", slow)
    two, interrupted = judged(recipe, space, keep=20, workers=2, report=quiet)
    assert two == one and not interrupted and one.ranked > 0


# --- ranking -------------------------------------------------------------------------------------


def candidates(draw: Any) -> Iterator[Candidate]:
    point = Point(8, 1, 1, 1, 1, 1, 1)
    for number, (seconds, memory) in enumerate(draw):
        yield Candidate(seconds, memory, Layout(point._replace(gpus=number), False, "none"), ALL_OFF)


pairs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30)


@given(pairs, st.integers(1, 5))
def test_the_best_are_the_first_of_all(drawn: list[tuple[int, int]], keep: int) -> None:
    ranking = Ranking(keep)
    for candidate in candidates(drawn):
        ranking.add_best(candidate)
    assert ranking.best == sorted(candidates(drawn))[:keep]


@given(pairs, st.integers(0, 30))
def test_the_front_holds_what_nothing_beats_in_time_and_memory(drawn: list[tuple[int, int]], cut: int) -> None:
    one, other = Ranking(1), Ranking(1)
    for number, candidate in enumerate(candidates(drawn)):
        (one if number < cut else other).add_to_front(candidate)
    one.add(other)
    front = [(candidate.seconds, candidate.memory) for candidate in one.front]
    unbeaten = {pair for pair in drawn if not any(o != pair and o[0] <= pair[0] and o[1] <= pair[1] for o in drawn)}
    assert front == sorted(unbeaten)


# --- what is shown -------------------------------------------------------------------------------


def test_what_is_shown_is_legal_fits_and_is_ranked() -> None:
    result = found(LLAMA, tp="2,4,8", pp="2,4", vp="1,5", cp="1,2", micro_batch_size="1")
    assert len(result.best) == 5
    assert [each.seconds for each in result.best] == sorted(each.seconds for each in result.best)
    for each in (*result.best, *result.front):
        facts = derive(recipe_from_mapping(each.recipe))
        assert plan(facts).ok
        assert each.memory.total <= most_allowed(capacity_of(facts) or 0.0)
    memories = [each.memory.total for each in result.front]
    assert memories == sorted(memories, reverse=True)
    assert result.judged == result.ranked + sum(result.refused.values()) + sum(result.too_large.values())


def test_the_model_and_the_global_batch_stay() -> None:
    before = read_source(MIXTRAL).recipe
    for each in found(MIXTRAL, pp="2,4", vp="4,8", cp="1", ep="8", tp="1").best:
        after = recipe_from_mapping(each.recipe)
        assert after.train.global_batch_size == before.train.global_batch_size
        for name in ("num_layers", "hidden_size", "num_moe_experts", "seq_length", "moe_router_topk"):
            assert getattr(after.model, name) == getattr(before.model, name)


def test_overrides_make_the_recipe_that_is_saved() -> None:
    best = found(LLAMA, top=1, tp="4", pp="2", vp="1,8", cp="2", micro_batch_size="1").best[0]
    again = load_recipe(LLAMA, best.changes)
    saved = recipe_from_mapping(best.recipe)
    assert (again.model, again.train, again.comm_overlap) == (saved.model, saved.train, saved.comm_overlap)
    assert plan(derive(again)).settings == plan(derive(saved)).settings


def test_what_the_recipe_says_of_its_own_stages_goes_with_other_ones() -> None:
    path = ROOT / "recipes" / "deepseek_v3_h100.yaml"
    facts, own = derive(load_recipe(path)), read_source(path)
    mesh = facts.parallelism
    point = Point(mesh.world_size, mesh.tp, mesh.pp, mesh.cp, mesh.ep, mesh.vp or 1, 1)
    same = changed_mapping(own.values, changes_of(facts, Layout(point, True, "full"), ALL_OFF))
    assert same["model"]["pipeline_model_parallel_layout"] == own.values["model"]["pipeline_model_parallel_layout"]
    for size in (mesh.pp * 2, 1):
        layout = Layout(point._replace(pp=size, vp=1), True, "full")
        other = changed_mapping(own.values, changes_of(facts, layout, ALL_OFF))
        assert other["model"]["pipeline_model_parallel_layout"] == balanced_stages(61, 1, size)


@pytest.mark.parametrize("name", ["deepseek_v3_h100", "deepseek_v3_gb200"])
def test_equal_stages_are_those_that_nvidia_lays_out(name: str) -> None:
    """DeepSeek-V3's 61 layers and one MTP layer, over 32 and over 16 chunks."""
    facts = derive(load_recipe(ROOT / "recipes" / f"{name}.yaml"))
    assert facts.stages is not None
    assert balanced_stages(61, 1, len(facts.stages)) == "|".join(facts.stages)


@given(st.integers(1, 130), st.integers(0, 2), st.integers(2, 64))
def test_equal_stages_hold_every_layer_once(layers: int, predicted: int, chunks: int) -> None:
    text = balanced_stages(layers, predicted, chunks)
    if text is None:
        assert layers < chunks + predicted
        return
    counts = [stage.count("t") for stage in text.split("|")]
    assert len(counts) == chunks and sum(counts) == layers and text.count("m") == predicted
    assert min(counts[:-1]) > 0 and max(counts) - min(counts[:-1]) <= 1


def test_what_no_layout_survives_is_told_in_one_line() -> None:
    with pytest.raises(NothingFound, match=r"none of 288 layouts .* because: does not fit the GPU's memory$") as told:
        found(LLAMA, tp="1", pp="1", cp="1", vp="1", micro_batch_size="1,2,4,8,16,32,64,128", gpus="1,2,4,8")
    assert told.value.exit_code == 1
