"""NCCL logs, line by line: what a call counts, whom a communicator joins, and what is said of a damaged line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from nccl_log_lines import WORLD, call, init, one, read, totals

from overlapkit.measure.readers import nccl_log
from overlapkit.measure.readers.nccl_log import lines
from overlapkit.measure.readers.nccl_log.ranks import color_of

SAMPLES = Path(__file__).parent / "nccl"


@pytest.mark.parametrize("name", ["dp2_pp2_buckets_overlap.r0", "moe_ep2_a2a.r0", "tied_pp2.r0", "tied_pp2.r4"])
def test_samples_have_the_totals_and_the_ranks_that_were_recorded(name: str) -> None:
    recording = one(nccl_log.read([SAMPLES / f"{name}.log.gz"]))
    expected = json.loads((SAMPLES / f"{name}.expected.json").read_text())
    calls, moved = Counter[Any](), Counter[Any]()
    for row in expected["totals"]:
        key = tuple(expected["groups"][row["group"]]), row["op"], row["dtype"]
        calls[key] += row["count"]
        moved[key] += row["bytes"]
    found_calls, found_moved = Counter[Any](), Counter[Any]()
    for event in recording.events:
        key = recording.communicators[event.communicator].ranks, event.op, event.dtype
        found_calls[key] += event.calls
        found_moved[key] += event.message_bytes
    assert (found_calls, found_moved) == (calls, moved)
    assert recording.rank == expected["rank"]


def test_counts_of_gathers_and_scatters_are_one_ranks_part(tmp_path: Path) -> None:
    recording = one(
        read(
            tmp_path,
            call("AllGather", 2_097_152),
            call("ReduceScatter", 2_097_152),
            call("AllReduce", 1, ranks=1, comm=1, tag="[tag] "),
            call("AllReduce", 1, ranks=1, comm=1, tag="[a:b]"),
        )
    )
    mib = 2**20
    assert totals(recording) == {
        ("all_gather", "float32"): (1, 16 * mib),
        ("reduce_scatter", "float32"): (1, 16 * mib),
        ("all_reduce", "float32"): (2, 8),
    }
    assert [communicator.size for communicator in recording.communicators] == [2, 1]


def test_api_calls_of_2_28_move_their_count_per_peer(tmp_path: Path) -> None:
    lines = [call(function, 3, "bfloat16", ranks=4) for function in ("AlltoAll", "Gather", "Scatter")]
    found = totals(one(read(tmp_path, *lines)))
    assert found == {(op, "bfloat16"): (1, 3 * 4 * 2) for op in ("all_to_all", "gather", "scatter")}


class TestSequences:
    def exchange(self, *parts: int, comm: int = WORLD) -> list[str]:
        more = {"comm": comm, "ranks": len(parts)}
        return [
            call(function, part, root=peer, **more)
            for peer, part in enumerate(parts)
            if part
            for function in ("Send", "Recv")
        ]

    def test_sends_to_all_ranks_and_itself_are_one_all_to_all(self, tmp_path: Path) -> None:
        lines = [*self.exchange(1, 2, 3), *self.exchange(4, 5, 6)]
        for more in ([init(0, 3)], []):  # without its Init line, sends to all ranks show it
            assert totals(one(read(tmp_path, *more, *lines))) == {("all_to_all", "float32"): (2, 21 * 4)}

    def test_parts_of_no_bytes_have_no_line(self, tmp_path: Path) -> None:
        lines = [*self.exchange(1, 2, 3), *self.exchange(0, 5, 6), *self.exchange(7, 0, 0)]
        assert totals(one(read(tmp_path, init(0, 3), *lines))) == {("all_to_all", "float32"): (3, 24 * 4)}

    def test_a_pipelines_stay_send_and_recv(self, tmp_path: Path) -> None:
        lines = [call("Send", 8, root=2, ranks=3), call("Recv", 8, root=0, ranks=3), call("Recv", 4, root=2, ranks=3)]
        found = totals(one(read(tmp_path, init(1, 3), *lines)))
        assert found == {("send", "float32"): (1, 32), ("recv", "float32"): (2, 48)}

    @pytest.mark.parametrize(("function", "op"), [("Broadcast", "all_gather_list"), ("Reduce", "reduce_scatter_list")])
    def test_unequal_parts_from_every_rank_are_a_list(self, tmp_path: Path, function: str, op: str) -> None:
        lines = [call(function, count, root=root, ranks=3) for root, count in enumerate((5, 6, 7))]
        assert totals(one(read(tmp_path, *lines, *lines))) == {(op, "float32"): (2, 2 * 18 * 4)}

    def test_broadcasts_that_are_no_whole_list_stay_broadcasts(self, tmp_path: Path) -> None:
        roots = [(0, 5), (0, 6), (1, 6), (0, 5), (1, 4)]  # of three ranks: never the last one's
        lines = [call("Broadcast", count, root=root, ranks=3) for root, count in roots]
        equal = [call("Broadcast", 9, root=root, ranks=3) for root in range(3)]  # would be an AllGather
        found = totals(one(read(tmp_path, *lines, *equal)))
        assert found == {("broadcast", "float32"): (8, (26 + 27) * 4)}


class TestCommunicators:
    def test_colours_are_those_of_real_logs(self) -> None:
        known = {
            tuple(range(16)): 1734919490,
            (0, 1, 2, 3): 2003953581,
            (0, 4): 923304772,
            (1, 5): 1449462471,
            (2, 6): 120142604,
            (0, 2): 1684518034,
        }
        assert {ranks: color_of(ranks) for ranks in known} == known

    @pytest.mark.parametrize(
        "ranks", [(5, 13, 21, 29), tuple(range(8, 16)), (4, 5, 6, 7, 20, 21, 22, 23), (1, 3, 9, 11, 17, 19, 25, 27)]
    )
    def test_a_split_says_its_global_ranks_in_one_rank_s_log(self, tmp_path: Path, ranks: tuple[int, ...]) -> None:
        own = ranks[1]
        more = f"parent {WORLD:#x} splitCount 3 color {color_of(ranks)} key {own}"
        lines = [init(own, 32), init(1, len(ranks), comm=1, more=more), call("AllReduce", 4, comm=1, ranks=len(ranks))]
        recording = one(read(tmp_path, *lines))
        assert (recording.rank, recording.world_size) == (own, 32)
        world, split = recording.communicators
        assert (world.ranks, split.ranks, split.rank, split.order) == (tuple(range(32)), ranks, 1, 1)

    def test_a_colour_of_another_framework_says_nothing(self, tmp_path: Path) -> None:
        more = f"parent {WORLD:#x} splitCount 3 color 7 key 1"
        recording = one(read(tmp_path, init(1, 8), init(1, 2, comm=1, more=more), call("AllReduce", 4, comm=1)))
        assert [communicator.ranks for communicator in recording.communicators] == [tuple(range(8)), None]

    def test_ranks_are_joined_over_files_by_the_unique_id(self, tmp_path: Path) -> None:
        paths = []
        for rank in range(4):
            path = tmp_path / f"{rank}.log"
            pair = rank % 2
            own = {"pid": 1000 + rank}
            lines = [
                init(rank, 4, **own),
                init(rank // 2, 2, comm=1, more=f"commId 0x2{pair}", **own),
                call("AllReduce", 4, comm=1, **own),
            ]
            path.write_text("\n".join(lines))
            paths.append(path)
        reading = nccl_log.read(paths)
        pairs = [recording.communicators[1].ranks for recording in reading.recordings]
        assert pairs == [(0, 2), (1, 3), (0, 2), (1, 3)]

    def test_the_largest_communicator_is_not_the_world_where_there_are_two(self, tmp_path: Path) -> None:
        lines = []
        for pid, commid in ((1, "0x1"), (2, "0x2")):
            lines += [init(0, 2, pid=pid, more=f"commId {commid}"), call("AllReduce", 4, pid=pid)]
        reading = read(tmp_path, *lines)
        assert [(one.rank, one.world_size) for one in reading.recordings] == [(None, None)] * 2

    def test_without_init_lines_it_says_what_gives_them(self, tmp_path: Path) -> None:
        note = "no INIT lines, so that communicators are guesses: NCCL_DEBUG_SUBSYS=INIT,COLL gives them"
        assert note in read(tmp_path, call("AllReduce", 4)).notes
        assert note not in read(tmp_path, init(0, 2), call("AllReduce", 4)).notes

    @pytest.mark.parametrize("linked", [False, True])
    def test_whole_jobs_that_share_no_communicator_have_worlds_of_their_own(self, tmp_path: Path, linked: bool) -> None:
        lines = []
        for job in (1, 2):
            for rank in range(4):
                own = {"pid": 100 * job + rank}
                pair = f"commId 0x{'f' if linked else job}{rank // 2}"  # linked: it is two groups of one job
                lines += [init(rank, 4, more=f"commId 0x{job}", **own), init(rank % 2, 2, comm=1, more=pair, **own)]
                lines.append(call("AllReduce", 4, comm=1, **own))
        found = [
            (each.rank, each.world_size, each.communicators[1].ranks) for each in read(tmp_path, *lines).recordings
        ]
        pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
        whole = sorted([(rank, 4, pairs[rank]) for rank in range(4)] * 2)
        assert found == ([(None, None, None)] * 8 if linked else whole)
        lost = [line for line in lines if ":102:" not in line]  # of one rank of the first job nothing is there
        ranks = [each.rank for each in read(tmp_path, *lost).recordings]
        assert ranks == ([None] * 7 if linked else [0, 1, 2, 3, None, None, None])

    def test_a_pointer_is_reused_by_another_communicator(self, tmp_path: Path) -> None:
        destroyed = init(0, 2).replace("- Init COMPLETE", "- Destroy COMPLETE")
        lines = [
            *(init(0, 2, state=state) for state in ("START", "COMPLETE")),
            call("AllReduce", 4),
            destroyed,
            *(init(0, 8, more="commId 0x2f", state=state) for state in ("START", "COMPLETE")),
            call("AllReduce", 4, ranks=8),
        ]
        recording = one(read(tmp_path, *lines))
        assert [(known.label, known.size, known.order) for known in recording.communicators] == [
            ("comm 0xa0 (number 1 there)", 2, 0),
            ("comm 0xa0 (number 2 there)", 8, 1),
        ]
        assert [event.communicator for event in recording.events] == [0, 1]

    def test_without_init_lines_they_are_numbered_as_they_are_used(self, tmp_path: Path) -> None:
        recording = one(read(tmp_path, call("AllReduce", 4, comm=2), call("AllReduce", 4, comm=1)))
        assert [(known.label, known.order) for known in recording.communicators] == [("comm 0x2", 0), ("comm 0x1", 1)]
        assert (recording.rank, recording.communicators[0].ranks) == (None, None)

    def test_rccl_says_the_global_rank(self, tmp_path: Path) -> None:
        recording = one(read(tmp_path, call("AllReduce", 4, rest=" task 0 globalrank 13")))
        assert recording.rank == 13

    def test_a_host_whose_name_ends_with_another_s_is_another_behind_a_launcher_s_prefix(self, tmp_path: Path) -> None:
        hosts = ("worker-0", "job-worker-0")
        lines = [
            f"[default0]:{line}"
            for rank, host in enumerate(hosts)
            for line in (init(rank, 2).replace("node-0", host), call("AllReduce", 4, host=host))
        ]
        found = [(each.host, each.rank, totals(each)) for each in read(tmp_path, *lines).recordings]
        assert found == [(host, rank, {("all_reduce", "float32"): (1, 16)}) for rank, host in enumerate(hosts)]

    def test_a_second_run_on_the_same_host_is_another_process(self, tmp_path: Path) -> None:
        paths = [tmp_path / "first.log", tmp_path / "second.log"]
        for path in paths:
            path.write_text(f"{init(0, 2)}\n{call('AllReduce', 4)}\n")
        assert len(nccl_log.read(paths).recordings) == 2
        paths[1].write_text(f"{call('AllReduce', 4)}\n")  # goes on where the first file ends
        (recording,) = nccl_log.read(paths).recordings
        assert totals(recording) == {("all_reduce", "float32"): (2, 32)}


class TestDamage:
    def test_what_is_cut_is_counted_with_its_line(self, tmp_path: Path) -> None:
        whole = call("AllReduce", 4)
        lines = ["training", whole, whole[:-60], whole[:-90], init(0, 2)[:-30], call("Frobnicate", 4), whole]
        reading = read(tmp_path, *lines)
        assert [(problem.line, problem.count, problem.what) for problem in reading.problems] == [
            (3, 2, "a line that looks like a call is cut or damaged"),
            (5, 1, "a line that looks like an Init is cut or damaged"),
            (6, 1, "a call of frobnicate, which is unknown"),
        ]
        assert totals(reading.recordings[0]) == {("all_reduce", "float32"): (2, 32)}

    def test_a_line_that_another_one_cuts(self, tmp_path: Path) -> None:
        whole, other = call("AllReduce", 4), call("AllReduce", 4, pid=2000)
        at = whole.index(" datatype") + 5
        reading = read(tmp_path, whole, other, whole[:at] + other, whole[at:], whole + other, other)
        assert [(problem.line, problem.count) for problem in reading.problems] == [(3, 2)]
        assert [totals(recording)["all_reduce", "float32"][0] for recording in reading.recordings] == [2, 4]

    def test_lines_of_megabytes_are_passed_over(self, tmp_path: Path) -> None:
        line = call("AllReduce", 4)
        path = tmp_path / "job.log"
        for length in (lines.LONGEST + 1, 5 * lines.LONGEST):
            path.write_text(f"{line}\n{'opCount ' * (length // 8 + 1)}\n{line}\n{line[:-60]}\n")
            reading = nccl_log.read([path])
            assert [(problem.line, problem.count) for problem in reading.problems] == [(2, 1), (4, 1)]
            assert totals(reading.recordings[0]) == {("all_reduce", "float32"): (2, 32)}

    def test_memory_does_not_grow_with_the_log(self, tmp_path: Path) -> None:
        path = tmp_path / "bomb.log.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
            file.write(b"\n")
            for index in range(20_000):
                file.write(f"{call('Send', index, root=1)}\n".encode())
        tracemalloc.start()
        reading = nccl_log.read([path])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 32 << 20
        (recording,) = reading.recordings
        assert totals(recording) == {("send", "float32"): (20_000, 4 * sum(range(20_000)))}
        assert len(recording.events) == 1

    def test_a_cut_gz_gives_what_comes_before(self, tmp_path: Path) -> None:
        packed = gzip.compress("".join(f"{call('AllReduce', index)}\n" for index in range(9000)).encode())
        path = tmp_path / "job.log.gz"
        for damaged in (packed[: len(packed) // 2], packed[: len(packed) // 2] + bytes(range(256)) * 99):
            path.write_bytes(damaged)
            reading = nccl_log.read([path])
            # What the damage makes of a line may look like one of another host.
            assert 1000 < max(totals(one)["all_reduce", "float32"][0] for one in reading.recordings) < 9000
            assert any("gz file" in problem.what for problem in reading.problems)

    @pytest.mark.parametrize("filling", [b"\n", b"\0", b"all is well\n"])
    def test_a_gz_bomb_is_given_up(self, tmp_path: Path, filling: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lines, "MOST_USELESS", 4 << 20)
        good = f"{call('AllReduce', 4)}\n".encode()
        path = tmp_path / "job.log.gz"
        path.write_bytes(gzip.compress(good * 60_000 + filling * (8 << 20) + good))
        reading = nccl_log.read([path])
        assert [totals(each)["all_reduce", "float32"][0] for each in reading.recordings] == [60_000]
        assert any("its rest is not read, 4 MB hold nothing of use" in problem.what for problem in reading.problems)

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
    def test_other_encodings(self, tmp_path: Path, encoding: str) -> None:
        path = tmp_path / "job.log"
        text = f"{init(0, 2)}\r\n{call('AllReduce', 4)}\r\n" * 3
        path.write_bytes(text.encode(encoding))
        assert nccl_log.recognises(path.read_bytes()[:65536], path)
        assert totals(one(nccl_log.read([path]))) == {("all_reduce", "float32"): (3, 48)}

    @pytest.mark.parametrize("content", [b"", b"\0" * 99_999, bytes(range(256)) * 999, b"\x1f\x8b", b"\n" * 9999])
    def test_a_file_without_calls_says_so(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "x.log"
        path.write_bytes(content)
        reading = nccl_log.read([path, tmp_path / "missing.log"])
        assert reading.recordings == ()
        assert {problem.source for problem in reading.problems} == {str(path), str(tmp_path / "missing.log")}

    def test_lines_of_more_processes_than_are_kept_are_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nccl_log, "_MOST_PROCESSES", 2)
        lines = [line for pid in (1, 2, 3) for line in (init(0, 2, pid=pid), call("AllReduce", 4, pid=pid))]
        reading = read(tmp_path, *lines, lines[-1])
        assert len(reading.recordings) == 2
        assert [(problem.line, problem.count) for problem in reading.problems] == [(5, 3)]

    def test_names_with_control_characters_are_escaped(self, tmp_path: Path) -> None:
        path = tmp_path / "a\x1b[2Jb.log"
        path.write_text(f"\x1b[31m{call('AllReduce', 4, host='no-de')}\n")
        (recording,) = nccl_log.read([path]).recordings
        assert "\x1b" not in recording.source
        assert recording.host is not None
        assert recording.host.isprintable()


def test_progress_is_told_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(f"{call('AllReduce', 4)}\n" * 20_000)
    told: list[int] = []
    nccl_log.read([path], told.append)
    assert len(told) > 1
    assert sum(told) == path.stat().st_size


def test_logs_are_recognised_by_what_they_say_or_by_their_name() -> None:
    assert nccl_log.recognises(b"x NCCL INFO Bootstrap", Path("slurm-12"))
    assert nccl_log.recognises(b"iteration 1", Path("train.log.gz"))
    assert not nccl_log.recognises(b"iteration 1", Path("train.py"))
    assert not nccl_log.recognises(b'{"header"', Path("inspector.log"))
    assert not nccl_log.recognises(b"SQLite format 3\0", Path("profile.log"))
