"""Traces of PyTorch's profiler: what each call moved, in which group, and how long the device was at it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kineto import GROUPS, collective, event, kernel, record, step, trace, written

from overlapkit.measure.events import Recording, Span
from overlapkit.measure.readers import torch_trace
from overlapkit.measure.readers.torch_trace import json_stream

SAMPLES = Path(__file__).parent / "traces"
TOTALS = json.loads((SAMPLES / "totals.json").read_text(encoding="utf-8"))
SUM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"


@pytest.fixture(params=["msgspec", "json"], autouse=True)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds with msgspec and without it."""
    if request.param == "json":
        monkeypatch.setattr(json_stream, "fast", None)
    else:
        pytest.importorskip("msgspec")
    return request.param


@pytest.fixture(params=[1 << 20, 700], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds whether a trace is one block or many."""
    monkeypatch.setattr(json_stream, "BLOCK", request.param)


def reading(path: Path) -> Recording:
    found = torch_trace.read([path])
    assert found.problems == ()
    (recording,) = found.recordings
    return recording


def of(folder: Path, *events: dict[str, Any], **header: Any) -> Recording:
    return reading(written(folder, trace(list(events), **header)))


def moved(recording: Recording) -> list[tuple[str | None, str, str, int, int]]:
    """Group, operation, type, calls, message bytes."""
    described = [each.description for each in recording.communicators]
    return [(described[e.communicator], e.op, e.dtype, e.calls, e.message_bytes) for e in recording.events]


@pytest.mark.parametrize("name", TOTALS)
def test_a_step_of_megatron_comes_out_to_the_byte(name: str) -> None:
    recording = reading(SAMPLES / f"{name}.trace.json.gz")
    rows = [list(row) for row in TOTALS[name]["rows"]]
    size = {each.description: each.size for each in recording.communicators}
    assert sorted([group, size[group], *rest] for group, *rest in moved(recording)) == sorted(rows)


@pytest.mark.parametrize("name", TOTALS)
def test_each_group_has_its_ranks_and_the_processes_place_in_it(name: str) -> None:
    recording = reading(SAMPLES / f"{name}.trace.json.gz")
    assert {each.description: list(each.ranks or ()) for each in recording.communicators} == TOTALS[name]["ranks"]
    rank = int(name.rpartition("r")[2])
    assert recording.rank == rank
    assert all(each.ranks and each.rank == each.ranks.index(rank) for each in recording.communicators)


def test_a_list_of_ranks_that_the_profiler_cut_is_taken_from_the_job() -> None:
    recording = reading(SAMPLES / "truncated_ranks.r0.trace.json.gz")
    (world,) = [each for each in recording.communicators if each.size == 32]
    assert world.ranks == tuple(range(32))


def test_without_the_job_a_cut_list_comes_from_start_and_stride(tmp_path: Path) -> None:
    args = collective("allreduce", "3", 8, 8)
    cut = {"Process Group Ranks": "[1, 3, ..., 63]", "Global rank start": 1, "Global rank stride": 2, "Group size": 32}
    recording = of(tmp_path, record(1, {**args, **cut, "Rank": 2}), distributedInfo=None)
    assert recording.communicators[0].ranks == tuple(range(1, 65, 2))
    assert recording.rank == 5


@pytest.mark.parametrize(
    ("name", "op", "message"),
    [
        ("allreduce", "all_reduce", 100),
        ("allreduce_coalesced", "all_reduce", 100),
        ("_allgather_base", "all_gather", 800),
        ("allgather_into_tensor_coalesced", "all_gather", 800),
        ("all_gather", "all_gather_list", 800),
        ("_reduce_scatter_base", "reduce_scatter", 100),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter", 100),
        ("reduce_scatter", "reduce_scatter_list", 100),
        ("all_to_allv", "all_to_all", 100),
        ("broadcast", "broadcast", 100),
        ("send", "send", 100),
        ("recv", "recv", 100),
        ("barrier", "barrier", 100),
        ("a_new_one", "a_new_one", 100),
    ],
)
def test_every_name_is_an_operation_with_its_message(tmp_path: Path, name: str, op: str, message: int) -> None:
    recording = of(tmp_path, record(1, collective(name, "1", 100, 800, "Byte")))
    assert moved(recording) == [("TENSOR_MODEL_PARALLEL_GROUP", op, "uint8", 1, message)]


@pytest.mark.parametrize(
    ("written_as", "dtype", "width"),
    [("Float", "float32", 4), ("BFloat16", "bfloat16", 2), ("Long", "int64", 8), ("Bool", "bool", 1)],
)
def test_types_have_their_width(tmp_path: Path, written_as: str, dtype: str, width: int) -> None:
    recording = of(tmp_path, record(1, collective("allreduce", "1", 10, 10, written_as)))
    assert [(e.dtype, e.message_bytes) for e in recording.events] == [(dtype, 10 * width)]


def test_wait_and_init_move_nothing(tmp_path: Path) -> None:
    recording = of(tmp_path, record(1, collective("wait", "1", 0, 0)), record(2, collective("init", "1", 0, 0)))
    assert moved(recording) == []


def test_equal_calls_are_counted_together_and_never_with_their_kernels(tmp_path: Path) -> None:
    args = collective("allreduce", "1", 100, 100)
    calls = [record(float(at), args) for at in (1, 2, 3)]
    kernels = [
        kernel(SUM, at + 10.0, 1.0, **{**args, "External id": call["args"]["External id"]})
        for at, call in enumerate(calls)
    ]
    recording = of(tmp_path, *calls, *kernels)
    assert moved(recording) == [("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce", "bfloat16", 3, 600)]
    assert recording.spans == [Span(at + 10.0, at + 11.0, 0, "all_reduce", "bfloat16") for at in range(3)]


def test_without_host_activity_the_kernels_are_counted(tmp_path: Path) -> None:
    recording = of(tmp_path, kernel(SUM, 10, 1, **collective("allreduce", "1", 100, 100)))
    assert moved(recording) == [("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce", "bfloat16", 1, 200)]
    assert any("counted by the kernels" in note for note in recording.notes)


def test_a_kernel_of_a_batch_belongs_to_the_calls_before_its_launch(tmp_path: Path) -> None:
    """batch_isend_irecv records its calls, and launches one kernel when the group ends: it names none of them."""
    recording = of(
        tmp_path,
        record(1, collective("send", "2", 8, 8)),
        record(2, collective("recv", "2", 8, 8)),
        record(2.5, collective("allreduce", "1", 8, 8), tid=9),
        event("cuda_runtime", "cudaLaunchKernelExC", 3, correlation=44),
        record(4, collective("allreduce", "1", 8, 8)),
        kernel(SEND_RECV, 30, 5, correlation=44, **{"External id": 4000}),
    )
    (span,) = recording.spans or ()
    assert recording.communicators[span.communicator or 0].description == "PIPELINE_MODEL_PARALLEL_GROUP"
    assert (span.op, span.start_us, span.end_us) == ("recv", 30, 35)


def test_a_kernel_that_nothing_names_still_counts_as_communication(tmp_path: Path) -> None:
    recording = of(tmp_path, kernel(SEND_RECV, 30, 5), kernel(GEMM, 30, 2, 7))
    assert recording.spans == [Span(30, 35, None, "send_recv", "unknown")]
    assert recording.busy == [(30, 32)]
    assert "communication kernels that name no process group: 1; their time counts" in recording.notes


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
        ("_Z30ncclDevKernel_AllGather_RING_LLP11ncclDevComm", "all_gather"),
        ("nccldevkernel_allgather_ring_ll", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("ncclSymkDevKernel_ReduceScatter_LL_sum_bf16", "reduce_scatter"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("rcclGenericKernel", "communication"),
        ("void deep_ep::internode::dispatch<false, 8, 64>(int4*)", "dispatch"),
        ("void deep_ep::intranode::combine<__nv_bfloat16>(int4*)", "combine"),
        ("hybrid_ep::dispatch_kernel<int>", "dispatch"),
        ("void nvshmemi_transfer_rma_nbi<1>()", "nvshmem"),
        ("kuserbuffers_pushsend(int*, int*, int4*, int4*, int)", "userbuffers"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop", "userbuffers"),
        ("multimem_all_reduce_kernel", "all_reduce"),
    ],
)
def test_every_spelling_of_a_communication_kernel_is_one(tmp_path: Path, name: str, op: str) -> None:
    assert of(tmp_path, kernel(name, 30, 5)).spans == [Span(30, 35, None, op, "unknown")]


@pytest.mark.parametrize("name", [GEMM, "void at::native::reduce_kernel<512, 1>", "moe_permute_kernel", "dispatcher"])
def test_other_kernels_are_work(tmp_path: Path, name: str) -> None:
    recording = of(tmp_path, kernel(name, 30, 5))
    assert (recording.spans, recording.busy) == ([], [(30, 35)])


def test_copies_are_device_work_and_waiting_is_not(tmp_path: Path) -> None:
    recording = of(
        tmp_path,
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1, 2),
        event("gpu_memset", "Memset (Device)", 4, 1),
        event("cuda_sync", "Stream Wait Event", 10, 50),
        event("cuda_sync", "Context Sync", 10, 50),
        event("kernel", "Event Sync", 10, 50),
        event("gpu_user_annotation", "nccl:all_reduce", 10, 50),
    )
    assert recording.busy == [(1, 3), (4, 5)]
    assert recording.spans == []


def test_every_profiler_step_counts(tmp_path: Path) -> None:
    args = collective("allreduce", "1", 100, 100)
    calls = [record(at, args) for at in (5.0, 12.0, 18.0, 25.0, 31.0)]
    recording = of(tmp_path, *(step(n, 10.0 * n, 10.0) for n in (1, 2)), *calls)
    assert [(each.number, each.start_us, each.end_us) for each in recording.windows] == [(1, 10, 20), (2, 20, 30)]
    assert (recording.steps, recording.steps_by) == (2, "ProfilerStep ranges")
    assert [(e.step, e.calls, e.message_bytes) for e in recording.events] == [(None, 2, 400), (1, 2, 400), (2, 1, 200)]


FLAG = collective("allreduce", "1", 1, 1, dtype="Int")


def test_without_ranges_the_flag_that_recurs_marks_the_steps(tmp_path: Path) -> None:
    """Three marks bound two steps; what comes before and after them belongs to none."""
    args = collective("allreduce", "1", 100, 100)
    calls = [record(at, args) for at in (5.0, 11.0, 12.0, 25.0, 31.0)]
    marks = [record(at, FLAG) for at in (10.0, 20.0, 30.0)]
    recording = of(tmp_path, *calls, *reversed(marks), record(9.0, collective("allreduce", "0", 1, 1, dtype="Int")))
    by = "an all_reduce of one int32 on process group 1 (TENSOR_MODEL_PARALLEL_GROUP)"
    assert (recording.steps, recording.steps_by) == (2, by)
    assert [(each.number, each.start_us, each.end_us) for each in recording.windows] == [(1, 10, 20), (2, 20, 30)]
    assert {(e.step, e.calls) for e in recording.events if e.message_bytes > 4 * e.calls} == {(None, 2), (1, 2), (2, 1)}


def test_a_single_mark_makes_a_trace_one_step_and_ranges_say_more_than_marks(tmp_path: Path) -> None:
    recording = of(tmp_path, record(5.0, FLAG))
    assert (recording.steps, recording.steps_by is None, recording.windows) == (0, False, ())
    recording = of(tmp_path, step(1, 0, 8), *(record(at, FLAG) for at in (1.0, 2.0, 3.0)))
    assert (recording.steps, recording.steps_by) == (1, "ProfilerStep ranges")


def test_without_ranges_and_marks_there_are_no_steps(tmp_path: Path) -> None:
    recording = of(tmp_path, record(5.0, collective("allreduce", "1", 2, 2, dtype="Int")))
    assert (recording.steps, recording.steps_by) == (0, None)


def test_a_step_lasts_until_the_next_begins_on_the_device(tmp_path: Path) -> None:
    recording = of(
        tmp_path,
        step(4, 10, 8),
        step(5, 20, 8),
        step(4, 13, 9, "gpu_user_annotation"),
        step(5, 26, 9, "gpu_user_annotation"),
        record(27, collective("allreduce", "1", 8, 8)),
    )
    assert [(each.start_us, each.end_us) for each in recording.windows] == [(13, 26), (26, 35)]
    assert recording.events[0].step == 5  # by the host's time


def test_the_empty_step_behind_the_last_is_none(tmp_path: Path) -> None:
    recording = of(tmp_path, step(0, 10, 8), step(1, 20, 1), event("cpu_op", "aten::mm", 12))
    assert recording.steps == 1
    assert any("ProfilerStep#1 holds no operator" in note for note in recording.notes)


def test_a_trace_of_the_cpu_alone_says_so() -> None:
    recording = reading(SAMPLES / "tied_pp2.r0.trace.json.gz")
    assert (recording.spans, recording.busy) == (None, None)
    assert any(note.startswith("no GPU kernels captured") for note in recording.notes)


def test_gloo_gives_calls_by_shape_without_a_group() -> None:
    found = torch_trace.read([SAMPLES / "gloo.r0.trace.json.gz"])
    (recording,) = found.recordings
    assert moved(recording) == [
        (None, "all_reduce", "float32", 5, 4 * (3 * 1024 + 64 * 8 + 1024 + 77)),
        (None, "all_gather", "bfloat16", 1, 2 * 64),
        (None, "reduce_scatter", "float32", 2, 2 * 4096),
        (None, "all_gather_list", "unknown", 1, 0),
        (None, "send", "bfloat16", 1, 64),
        (None, "recv", "bfloat16", 1, 64),
        (None, "all_gather", "float32", 1, 4096),
        (None, "all_to_all", "float32", 2, 4 * (32 + 40)),
        (None, "broadcast", "int64", 1, 40),
        (None, "barrier", "uint8", 1, 1),
    ]
    assert any("no record_param_comms" in note for note in recording.notes)
    assert [problem.what.partition(":")[0] for problem in found.problems] == ["c10d"]


def test_operators_inside_recorded_calls_are_not_counted_again(tmp_path: Path) -> None:
    recording = of(
        tmp_path,
        event("cpu_op", "c10d::allreduce_", 1, **{"Input Dims": [[[8]]], "Input type": ["TensorList"]}),
        record(2, collective("allreduce", "1", 8, 8)),
    )
    assert moved(recording) == [("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce", "bfloat16", 1, 16)]


def test_old_traces_know_a_group_by_its_size_and_ranks(tmp_path: Path) -> None:
    """torch 2.1: no name, no description."""
    old = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 4, "Out msg nelems": 4}
    recording = of(
        tmp_path,
        *(record(at, {**old, "Group size": size}) for at, size in ((1, 2), (2, 4), (3, 2))),
        distributedInfo=None,
    )
    assert [(each.size, each.ranks, each.description) for each in recording.communicators] == [
        (2, None, None),
        (4, None, None),
    ]
    assert [(e.communicator, e.calls) for e in recording.events] == [(0, 2), (1, 1)]


def test_joined_gzip_files_are_one_trace(tmp_path: Path) -> None:
    text = json.dumps(trace([record(at, collective("send", "2", 8, 8)) for at in (1, 2)])).encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]))
    assert [e.calls for e in reading(path).events] == [2]


def test_several_files_are_several_recordings(tmp_path: Path) -> None:
    paths = [written(tmp_path, trace([record(1, collective("send", "2", 8, 8))]), f"{n}.json.gz") for n in (0, 1)]
    assert [each.source for each in torch_trace.read(paths).recordings] == list(map(str, paths))


def test_progress_tells_the_bytes_of_the_files(tmp_path: Path) -> None:
    paths = [written(tmp_path, trace([]), name) for name in ("a.json", "b.json.gz")]
    told: list[int] = []
    torch_trace.read(paths, told.append)
    assert sum(told) == sum(path.stat().st_size for path in paths)


def test_a_trace_is_recognised_by_its_beginning(tmp_path: Path) -> None:
    head = json.dumps(trace([])).encode()
    assert torch_trace.recognises(head, tmp_path)
    assert torch_trace.recognises(b'{\n "schemaVersion": 1,\n "deviceProperties": [\n', tmp_path)
    assert not torch_trace.recognises(b'{"schemaVersion": 1, "rows": []}', tmp_path)
    assert not torch_trace.recognises(b'[{"traceEvents": 1}]', tmp_path)


def test_groups_have_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    recording = of(tmp_path, *(record(1, collective("allreduce", name, 8, 8)) for name in reversed(GROUPS)))
    assert [each.order for each in recording.communicators] == [3, 2, 1, 0]
