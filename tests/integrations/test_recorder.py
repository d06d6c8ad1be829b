"""The recorder in a live job: what it counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from overlapkit.errors import RecipeError
from overlapkit.integrations import recorder_file
from overlapkit.measure.events import CommEvent, Recording
from overlapkit.measure.how import instructions
from overlapkit.measure.readers.recorder import read
from overlapkit.record import record, step

EVERY_CALL = Path(__file__).parent / "measure" / "every_call.py"
WORLD = "default_pg"


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is a job of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def recording(folder: Path) -> Recording:
    reading = read(list(folder.iterdir()))
    assert reading.problems == ()
    (found,) = reading.recordings
    return found


def rows(found: Recording) -> list[tuple[Any, ...]]:
    """(group, op, dtype, calls, bytes), whatever the step."""
    return sorted((found.communicators[event.communicator].description, *event[1:5]) for event in found.events)


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


# --- what is counted -----------------------------------------------------------------------------


def test_every_call_counts_once_as_what_it_is(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = python(*launch, "-m", "overlapkit.record", "-o", str(tmp_path), "--", str(EVERY_CALL), env=environment)
    assert done.returncode == 0, done.stderr
    reading = read(list(tmp_path.iterdir()))
    assert reading.problems == ()
    first, second = sorted(reading.recordings, key=lambda found: found.rank or 0)
    f32 = 4
    both = [
        ("all_gather", "float32", 2, (12 + 14) * f32),
        ("all_gather_list", "float32", 1, 16 * f32),
        ("all_reduce", "bfloat16", 1, 3 * 2),
        ("all_reduce", "float32", 4, (1 + 2 + 4 + 5) * f32),
        ("all_to_all", "float32", 2, (24 + 26) * f32),
        ("barrier", "uint8", 1, 0),
        ("broadcast", "float32", 1, 14 * f32),
        ("broadcast", "int64", 1, 8),  # the size of the object
        ("gather", "float32", 1, 16 * f32),
        ("reduce", "float32", 1, 15 * f32),
        ("reduce_scatter", "float32", 2, (18 + 20) * f32),
        ("reduce_scatter_list", "float32", 1, 22 * f32),
        ("scatter", "float32", 1, 17 * f32),
    ]
    for found, sent, received in ((first, 18 + 19 + 20, 20), (second, 20, 18 + 19 + 20)):
        messages = [
            ("recv", "float32", 1 if found is first else 3, received * f32),
            ("send", "float32", 3 if found is first else 1, sent * f32),
        ]
        counted = rows(found)
        (pickled,) = [row for row in counted if row[1:3] == ("broadcast", "uint8")]
        assert (pickled[0], pickled[3], pickled[4] > 0) == ("BOTH", 1, True)
        counted.remove(pickled)
        assert counted == sorted(
            [
                *(("BOTH", *row) for row in [*both, *messages]),
                (f"ALONE_{found.rank}", "all_reduce", "float32", 1, 21 * f32),
                (WORLD, "all_reduce", "float32", 1, 23 * f32),
            ]
        )
        assert {group.description: group.ranks for group in found.communicators} == {
            "BOTH": (0, 1),
            f"ALONE_{found.rank}": (found.rank,),
            WORLD: (0, 1),
        }


def test_a_mode_that_calls_a_collective_again_does_not_count_it_again(tmp_path: Path) -> None:
    class Again(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with record(tmp_path), Again():
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2), 0)
    assert rows(recording(tmp_path)) == [
        (WORLD, "all_reduce", "float32", 1, 12),
        (WORLD, "broadcast", "float32", 1, 8),
    ]


def test_names_of_other_modules_are_recorded_and_given_back(tmp_path: Path) -> None:
    """As Megatron-Core's, which were imported long before this test."""
    from megatron.core.tensor_parallel import layers

    before = layers.dist_all_gather_func, dist.isend, distributed_c10d.isend, dist.destroy_process_group
    with record(tmp_path):
        layers.dist_all_gather_func(torch.empty(4), torch.ones(4))
        assert dist.isend is distributed_c10d.isend  # else P2POp takes neither
        assert dist.isend is not before[1]
    assert (layers.dist_all_gather_func, dist.isend, distributed_c10d.isend, dist.destroy_process_group) == before
    dist.all_reduce(torch.ones(1))
    assert rows(recording(tmp_path)) == [(WORLD, "all_gather", "float32", 1, 16)]


def test_a_collective_that_fails_says_what_it_says_without(tmp_path: Path) -> None:
    with record(tmp_path):
        with pytest.raises(TypeError, match="all_reduce"):
            dist.all_reduce()
        with pytest.raises((TypeError, ValueError)):
            dist.all_reduce("no tensor")
        dist.all_reduce(torch.ones(1))
    (path,) = tmp_path.iterdir()
    reading = read([path])
    assert rows(reading.recordings[0]) == [(WORLD, "all_reduce", "float32", 1, 4)]
    assert sum(problem.count for problem in reading.problems) == 2


# --- steps ---------------------------------------------------------------------------------------


def training(steps: int, *, marked_by: str) -> None:
    for number in range(1, steps + 1):
        for _ in range(number):
            dist.all_reduce(torch.ones(10, dtype=torch.bfloat16))
        if marked_by == "int32":
            dist.all_reduce(torch.ones(1, dtype=torch.int32))
        elif marked_by == "float32":
            dist.all_reduce(torch.ones(1))
        else:
            step()


def calls_by_step(found: Recording) -> dict[int | None, int]:
    return {event.step: event.calls for event in found.events if event.dtype == "bfloat16"}


@pytest.mark.parametrize("marked_by", ["int32", "float32", "the script"])
def test_steps_are_the_periods_between_marks(marked_by: str, tmp_path: Path) -> None:
    with record(tmp_path):
        training(4, marked_by=marked_by)
    found = recording(tmp_path)
    assert calls_by_step(found) == {None: 1, 2: 2, 3: 3, 4: 4}
    assert found.steps == 3


@pytest.mark.parametrize("marked_by", ["int32", "float32", "the script"])
def test_a_window_of_steps(marked_by: str, tmp_path: Path) -> None:
    with record(tmp_path, steps=(3, 4)):
        training(6, marked_by=marked_by)
    assert calls_by_step(recording(tmp_path)) == {3: 3, 4: 4}


def test_a_group_that_is_made_anew_is_another_group(tmp_path: Path) -> None:
    with record(tmp_path):
        for name in ("FIRST", "SECOND"):
            group = dist.new_group([0], group_desc=name)
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)
    assert rows(recording(tmp_path)) == [
        ("FIRST", "all_reduce", "float32", 1, 8),
        ("SECOND", "all_reduce", "float32", 1, 8),
    ]


# --- what can go wrong ---------------------------------------------------------------------------


def test_it_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RecipeError, match="nothing can be recorded in it: Not a directory"),
        record(tmp_path / "file/x"),
    ):
        pass
    with pytest.raises(RecipeError, match="no steps 3-2; the first is 1"), record(tmp_path, steps=(3, 2)):
        pass
    with (
        record(tmp_path / "one"),
        pytest.raises(RecipeError, match="this process is being recorded already"),
        record(tmp_path / "two"),
    ):
        pass


def test_a_full_disk_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with record(tmp_path):
        training(2, marked_by="int32")

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(recorder_file.os, "write", full)
        training(3, marked_by="int32")
        monkeypatch.undo()
    assert capfd.readouterr().err.count("recording ends") == 1
    assert calls_by_step(recording(tmp_path)) == {None: 1, 2: 2}


def test_a_process_that_is_killed_leaves_what_it_had_called(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 1)\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=store)\n"
        "for _ in range(7):\n"
        "    dist.all_reduce(torch.ones(10))\n"
        "print('called', flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "overlapkit.record",
        "-o",
        str(tmp_path / "out"),
        "--",
        str(script),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "called\n"
        for _ in range(600):  # it is written within a second
            if '"calls"' in next((tmp_path / "out").iterdir()).read_text():
                break
            time.sleep(0.1)
        job.send_signal(signal.SIGKILL)
    found = recording(tmp_path / "out")
    assert rows(found) == [(WORLD, "all_reduce", "float32", 7, 280)]
    assert any("no end" in note for note in found.notes)


def test_a_forked_process_is_not_recorded(tmp_path: Path) -> None:
    with record(tmp_path):
        dist.all_reduce(torch.ones(2))
        child = os.fork()
        if child == 0:  # which has no threads of gloo, and would wait for them
            step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        dist.all_reduce(torch.ones(2))
    assert recording(tmp_path).events == (CommEvent(0, "all_reduce", "float32", 2, 16, None),)


# --- what measure --how prints -------------------------------------------------------------------


@pytest.mark.parametrize("source", ["recorder", "torch-trace"])
def test_the_loops_that_how_prints_run(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = [part.text for part in instructions("megatron-lm", source) if part.kind == "python"][-1]
    names = {"batches": range(15), "train_step": lambda batch: dist.all_reduce(torch.ones(2))}
    exec(loop, names)
    (path,) = (tmp_path / "measured").iterdir()
    if source == "recorder":
        assert recording(tmp_path / "measured").steps == 14
    else:
        assert path.name == "rank0.json.gz"
