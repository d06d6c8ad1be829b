"""``overlapkit.compare``: jobs as their recipe has them, jobs that ran otherwise, and inputs that have no pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from write_nccl_log import write_logs
from write_trace import HIDDEN, write_trace

import overlapkit
from overlapkit.measure.comparison import Comparison
from overlapkit.volume import Volume

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/llama2_7b_32xh20.yaml")
BASE = ("comm_overlap=null", "model.num_layers=2", "train.global_batch_size=4")
ON_8 = (*BASE, "cluster.num_gpus=8", "model.tensor_model_parallel_size=2", "model.vocab_size=32100")
USERBUFFERS = BASE[1:]
SP_OFF = "model.sequence_parallel=false"


def volume(*overrides: str) -> Volume:
    return overlapkit.volume(RECIPE, overrides)


def traced(folder: Path, ran: Sequence[str], *ranks: int) -> Path:
    """A folder of traces of some ranks of a job."""
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        write_trace(volume(*ran), folder / f"rank{rank:02}.json.gz", rank=rank)
    return folder


def logged(folder: Path, ran: Sequence[str], *_: int) -> Path:
    """A folder of the NCCL logs of all ranks of a job."""
    folder.mkdir(exist_ok=True)
    write_logs(volume(*ran), folder, steps=2)
    return folder


def statuses(found: Comparison) -> set[str]:
    return {row.status for rank in found.ranks for row in rank.rows}


# --- equal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [traced, logged])
def test_a_job_as_its_recipe_has_it_is_equal(source: Callable[..., Path], tmp_path: Path) -> None:
    found = overlapkit.compare(RECIPE, source(tmp_path / "in", ON_8, 0, 5), ON_8)
    assert found.equal and found.reasons == () and statuses(found) == {"equal"}
    assert {rank.pipeline_rank for rank in found.ranks} == {0, 1}
    assert all(rank.steps == 2 for rank in found.ranks)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("sample", ["nccl/tied_pp2.r{}.log.gz", "traces/tied_pp2.r{}.trace.json.gz"])
def test_what_real_software_left_behind_is_equal(sample: str, rank: int) -> None:
    """Of one step, which one mark stands for: the call is the same in the log and in the trace."""
    here = Path(__file__).parent
    found = overlapkit.compare(here / "tied_pp2.yaml", here / sample.format(rank))
    assert found.equal and [(one.steps, one.whole_input) for one in found.ranks] == [(1, True)]


def test_what_userbuffers_move_is_not_observable(tmp_path: Path) -> None:
    found = overlapkit.compare(RECIPE, traced(tmp_path / "in", USERBUFFERS, 0), USERBUFFERS)
    assert found.equal and statuses(found) == {"equal", "not_observable"}


def test_stages_that_nothing_was_measured_of_are_named(tmp_path: Path) -> None:
    found = overlapkit.compare(RECIPE, traced(tmp_path / "in", BASE, 0), BASE)
    assert found.equal and found.stages_without_input == (1,)


# --- different ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [traced, logged])
@pytest.mark.parametrize(
    ("ran", "what"),
    [
        ((SP_OFF,), "sequence parallelism off"),
        (("ddp.use_distributed_optimizer=false",), "no distributed optimizer"),
        (("model.should_pad_vocab=false",), "a vocabulary of 32100, not padded to 32256"),
        (("train.global_batch_size=8",), "4 microbatches, not 2"),
    ],
)
def test_the_reason_is_found_in_what_was_measured(
    source: Callable[..., Path], ran: Sequence[str], what: str, tmp_path: Path
) -> None:
    found = overlapkit.compare(RECIPE, source(tmp_path / "in", (*ON_8, *ran), 0, 5), ON_8)
    assert not found.equal
    assert [(reason.what, reason.after) for reason in found.reasons] == [(what, 0)]


def test_tp_traffic_that_did_not_go_through_userbuffers(tmp_path: Path) -> None:
    found = overlapkit.compare(RECIPE, traced(tmp_path / "in", BASE, 0), USERBUFFERS)
    assert "TP traffic did not go through userbuffers" in [reason.what for reason in found.reasons]


def test_an_input_of_a_larger_job_is_not_compared(tmp_path: Path) -> None:
    found = overlapkit.compare(RECIPE, traced(tmp_path / "in", BASE, 16), ON_8)
    assert not found.equal and found.ranks == ()
    assert [one.why for one in found.unpaired] == ["its job has 32 ranks, the recipe 8"]


def test_a_job_of_another_size_is_not_compared_and_does_not_disturb(tmp_path: Path) -> None:
    """A folder with the files of a smaller job: they are named, and what is compared is as without them."""
    traced(tmp_path / "in", BASE, 0)
    write_trace(volume(*ON_8), tmp_path / "in" / "smaller.json.gz", rank=5)
    found = overlapkit.compare(RECIPE, tmp_path / "in", BASE)
    assert [one.why for one in found.unpaired] == ["its job has 8 ranks, the recipe 32"]
    assert not found.equal and [rank.equal for rank in found.ranks] == [True]


def test_without_ranges_the_flag_of_each_step_marks_a_trace_as_it_marks_a_log(tmp_path: Path) -> None:
    write_trace(volume(*BASE), tmp_path / "trace.json.gz", steps=3, ranges=False)
    found = overlapkit.compare(RECIPE, tmp_path, BASE)
    assert found.equal and [(rank.steps, rank.whole_input) for rank in found.ranks] == [(2, False)]


def test_without_marks_the_number_of_steps_must_be_given(tmp_path: Path) -> None:
    write_trace(volume(*BASE), tmp_path / "trace.json.gz", ranges=False, scalars=False)
    found = overlapkit.compare(RECIPE, tmp_path, BASE)
    assert [one.why for one in found.unpaired] == ["nothing marks its optimizer steps; --steps says how many it covers"]
    (rank,) = overlapkit.compare(RECIPE, tmp_path, BASE, steps=2).ranks
    assert (rank.steps, rank.whole_input) == (2, True)
    assert {row.op for row in rank.rows if not row.matches} == {"all_reduce"}  # the scalars that are not there
    (rank,) = overlapkit.compare(RECIPE, tmp_path, BASE, steps=1).ranks
    assert {row.op for row in rank.rows if not row.matches} > {"all_reduce", "all_gather", "send"}


def test_the_broadcast_batch_is_explained(tmp_path: Path) -> None:
    ran = overlapkit.volume(RECIPE, BASE, data_broadcast=True)
    write_trace(ran, tmp_path / "trace.json.gz")
    found = overlapkit.compare(RECIPE, tmp_path, BASE)
    notes = {row.note for rank in found.ranks for row in rank.rows if row.status == "not_predicted"}
    assert notes == {"the batch of Megatron-LM: --data-broadcast predicts it"}
    assert overlapkit.compare(RECIPE, tmp_path, BASE, data_broadcast=True).equal


def log_with(folder: Path, *lines: str, steps: int = 2, at: int = 0) -> Path:
    """The log of rank 0 of a job as the recipe has it, with lines put in at some place."""
    paths = logged(folder, ON_8).glob("*.1000.log")
    (path,) = paths
    written = path.read_text().splitlines()
    if steps == 0:  # up to the first mark
        written = written[: 1 + next(at for at, line in enumerate(written) if "count 1 datatype 2 " in line)]
    at = next(index for index, line in enumerate(written) if "opCount" in line) if at == 0 else len(written) + at
    path.write_text("\n".join([*written[:at], *lines, *written[at:]]) + "\n")
    return path


def all_reduce(count: int, datatype: int, comm: str = "0x55aa00000000", ranks: int = 8) -> str:
    return (
        f"node-0:1000:1000 [0] NCCL INFO AllReduce: opCount ff sendbuff 0x7f00 recvbuff 0x7f00 count {count} "
        f"datatype {datatype} op 0 root 0 comm {comm} [nranks={ranks}] stream 0x5600"
    )


def test_what_lies_outside_the_steps_is_listed_and_not_judged(tmp_path: Path) -> None:
    path = log_with(tmp_path / "in", all_reduce(1000, 7), all_reduce(16, 9, "0x66", 3))
    found = overlapkit.compare(RECIPE, path, ON_8)
    (rank,) = found.ranks
    assert found.equal and (rank.steps, rank.unattributed_bytes) == (2, 0)
    assert ("WORLD", "all_reduce", "float32", 2, 4004) in {
        (one.group, one.op, one.dtype, one.count, one.message_bytes) for one in rank.outside_steps
    }
    assert [(one.message_bytes, one.step_bytes) for one in found.measured.ranks[0].unattributed] == [(32, 0)]


@pytest.mark.parametrize("datatype", [1, 7], ids=["torch before 2.3", "since"])
def test_a_barrier_in_a_step_is_no_difference(tmp_path: Path, datatype: int) -> None:
    path = log_with(tmp_path / "in", all_reduce(1, datatype), at=-2)
    found = overlapkit.compare(RECIPE, path, ON_8)
    (row,) = [row for row in found.ranks[0].rows if row.status == "beside_steps"]
    assert found.equal and (row.group, row.note) == ("WORLD", "barriers of timers, checkpoints and set-up")


def test_set_up_in_an_input_of_one_step_is_no_difference(tmp_path: Path) -> None:
    path = log_with(tmp_path / "in", all_reduce(1, 8), steps=0)
    found = overlapkit.compare(RECIPE, path, ON_8)
    assert found.equal and found.ranks[0].outside_steps == ()
    assert {row.op + " " + row.dtype for row in found.ranks[0].rows if row.status == "beside_steps"} == {
        "all_reduce float32",
        "all_reduce float64",
    }
    path = log_with(tmp_path / "in", all_reduce(1000, 8), steps=0)
    assert not overlapkit.compare(RECIPE, path, ON_8).equal


# --- overlap -------------------------------------------------------------------------------------------


def test_overlap_is_what_was_asked_for_planned_and_seen(tmp_path: Path) -> None:
    overrides = (*BASE[1:], "comm_overlap.tp_comm_overlap=false", "comm_overlap.overlap_param_gather=false")
    found = overlapkit.compare(RECIPE, traced(tmp_path / "in", overrides, 0), overrides)
    seen = {one.setting: one for one in found.overlap}
    assert {name: (one.requested, one.planned) for name, one in seen.items()} == {
        "model.tp_comm_overlap": (False, False),
        "model.overlap_p2p_comm": (None, False),
        "ddp.overlap_grad_reduce": (True, True),
        "ddp.overlap_param_gather": (False, False),
    }
    for name, axis in (("ddp.overlap_grad_reduce", "dp"), ("model.overlap_p2p_comm", "pp")):
        one = seen[name]
        assert one.time_us is not None and one.hidden_us is not None and one.exposed_us is not None
        assert one.hidden_us == pytest.approx(HIDDEN[axis] * one.time_us)
        assert one.hidden_us + one.exposed_us == pytest.approx(one.time_us)


def test_logs_without_times_leave_the_third_column_empty(tmp_path: Path) -> None:
    found = overlapkit.compare(RECIPE, logged(tmp_path / "in", ON_8), ON_8)
    assert {one.time_us for one in found.overlap} == {None}
    assert {one.axis for one in found.overlap} == {"TP", "PP", "DP"}
