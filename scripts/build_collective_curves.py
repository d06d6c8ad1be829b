"""Write overlapkit/data/collectives.json: NCCL's bus bandwidth inside one NVLink domain, by GPU family.

    python scripts/build_collective_curves.py                  # download aiconfigurator-core from PyPI, write the file
    python scripts/build_collective_curves.py WHEEL_OR_FOLDER  # the same from the wheel that is here, or unpacked
    python scripts/build_collective_curves.py --check          # write nothing; exit 1 when the committed file differs
    python scripts/build_collective_curves.py --leave-one-out TABLE   # print how well curves predict TABLE's points

The tables are AIConfigurator's (Apache-2.0, see NOTICE): latencies of the operations in 16-bit types among 2, 4 and 8
GPUs for powers of two from 512 bytes to 512 MiB. NCCL changes protocol at the same sizes on all GPUs of a family, so
that one curve serves them: log2(seconds) of GPU g at size x is c(x) + f_g(x), where c is the mean over the family and
f_g, what sets the GPU apart, changes slowly: its mean over five neighbouring sizes, at every third or fourth size.

TABLE holds points as JSON lines with system, op_name, num_gpus, bytes and latency_us, gzipped or not, or is a folder
with such a file, nccl_truth.jsonl.gz. Needs pyarrow to read the package's tables, and Python 3.11, which it asks for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from math import log, log2
from pathlib import Path
from statistics import fmean
from typing import Any

from overlapkit.catalogue import find_gpu
from overlapkit.cost.collectives import linear, log_seconds

DATA = Path(__file__).resolve().parent.parent / "overlapkit" / "data" / "collectives.json"
PACKAGE = "aiconfigurator-core==0.12.0"
FACTOR_SIZES = (10, 14, 18, 21, 24, 27)  # log2 bytes
FACTOR_REACH = 2  # sizes to either side that a factor is the mean of
MIB = 20  # log2 bytes
SIZES = range(9, 30)  # log2 bytes
TURNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A GPU as the package calls it, with the NCCL version whose table is used: the newest that has every operation."""

    folder: str
    gpu: str
    family: str
    nccl: str


SYSTEMS = (
    System(folder="a100_sxm", gpu="a100", family="ampere", nccl="2.27.3"),
    System(folder="h100_sxm", gpu="h100", family="hopper", nccl="2.29.2"),
    System(folder="h200_sxm", gpu="h200", family="hopper", nccl="2.29.2"),
    System(folder="b200_sxm", gpu="b200", family="blackwell", nccl="2.29.2"),
    System(folder="b300_sxm", gpu="b300", family="blackwell", nccl="2.29.2"),
    System(folder="gb200", gpu="gb200", family="blackwell", nccl="2.29.2"),
    System(folder="gb300", gpu="gb300", family="blackwell", nccl="2.29.2"),
)
FAMILY = {system.gpu: system.family for system in SYSTEMS}

# (GPU, operation, group size) -> log2 bytes -> log2 seconds
Key = tuple[str, str, int]
Points = dict[Key, dict[int, float]]


def read_package(place: Path) -> Points:
    """The points of the package's tables. One row in two is for bytes, which NCCL moves like any type."""
    from pyarrow.parquet import read_table as read_parquet

    points: Points = defaultdict(dict)
    for system in SYSTEMS:
        name = f"aiconfigurator_core/systems/data/{system.folder}/comm/nccl/{system.nccl}/nccl_perf.parquet"
        if place.is_dir():
            content = (place / name).read_bytes()
        else:
            with zipfile.ZipFile(place) as wheel:
                content = wheel.read(name)
        for row in read_parquet(BytesIO(content)).to_pylist():
            if row["nccl_dtype"] == "half":  # sizes are in elements, latencies in milliseconds
                key = (system.gpu, _op(row["op_name"]), row["num_gpus"])
                points[key][_log2(row["message_size"] * 2)] = log2(row["latency"] * 1e-3)
    return dict(points)


def read_table(place: Path) -> Points:
    file = place / "nccl_truth.jsonl.gz" if place.is_dir() else place
    content = file.read_bytes()
    text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
    gpus = {system.folder: system.gpu for system in SYSTEMS}
    points: Points = defaultdict(dict)
    for row in map(json.loads, text.splitlines()):
        key = (gpus[row["system"]], _op(row["op_name"]), row["num_gpus"])
        points[key][_log2(row["bytes"])] = log2(row["latency_us"] * 1e-6)
    return dict(points)


def _op(name: str) -> str:
    return "all_to_all" if name == "alltoall" else name


def _log2(count: int) -> int:
    if count.bit_count() != 1:
        sys.exit(f"{count} bytes: only powers of two are expected")
    return count.bit_length() - 1


def fit(points: Points) -> dict[str, Any]:
    """The table of collectives.json that follows from the points, whatever families and sizes they are of."""
    bandwidths: dict[str, Any] = {}
    factors: dict[str, Any] = {}
    for family, op, ranks in sorted({(FAMILY[gpu], op, ranks) for gpu, op, ranks in points}):
        members = {
            gpu: points[gpu, op, ranks] for gpu in FAMILY if FAMILY[gpu] == family and (gpu, op, ranks) in points
        }
        curve, apart = _fit_curve(members)
        entry = bandwidths.setdefault(family, {"nvlink_bytes_per_s": _nvlink(family), "bus_gb_per_s": {}})
        wire = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
        entry["bus_gb_per_s"].setdefault(op, {})[str(ranks)] = [
            float(f"{wire * 2.0**size / 2.0 ** curve[size] / 1e9:.4g}") for size in SIZES
        ]
        for gpu, values in apart.items():
            factors.setdefault(gpu, {}).setdefault(op, {})[str(ranks)] = [round(2.0**-value, 4) for value in values]
    return {
        "source": f"{PACKAGE} (PyPI), the NCCL tables of AIConfigurator, Apache-2.0",
        "nccl": {system.gpu: system.nccl for system in SYSTEMS},
        "log2_bytes": list(SIZES),
        "families": bandwidths,
        "factor_log2_bytes": list(FACTOR_SIZES),
        "factors": factors,
    }


def _nvlink(family: str) -> float:
    """Bytes/s in one direction per GPU: what the family's curves were measured with."""
    speeds = {gpu.nvlink_gb_per_s for gpu in map(find_gpu, FAMILY) if gpu is not None and FAMILY[gpu.name] == family}
    (speed,) = speeds
    if speed is None:
        sys.exit(f"overlapkit/data/gpus.yaml has no nvlink_gb_per_s of {family}")
    return speed / 2 * 1e9


def _fit_curve(members: Mapping[str, Mapping[int, float]]) -> tuple[dict[int, float], dict[str, tuple[float, ...]]]:
    """The family's curve at every size, and what sets each of several members apart at FACTOR_SIZES.

    Both in log2 seconds. Where points lack, each depends on the other: they are found in turns.
    """
    apart = {gpu: (0.0,) * len(FACTOR_SIZES) for gpu in members} if len(members) > 1 else {}
    curve: dict[int, float] = {}
    for _ in range(TURNS if apart else 1):
        curve = {
            size: fmean(
                points[size] - (linear(FACTOR_SIZES, apart[gpu], size) if apart else 0.0)
                for gpu, points in members.items()
                if size in points
            )
            for size in SIZES
            if any(size in points for points in members.values())
        }
        shared = {size for size in curve if sum(size in points for points in members.values()) > 1}
        for gpu in apart:
            apart[gpu] = tuple(_mean_apart(members[gpu], curve, shared, size) for size in FACTOR_SIZES)
        if apart:
            middle = [fmean(values) for values in zip(*apart.values(), strict=True)]
            apart = {gpu: tuple(v - m for v, m in zip(apart[gpu], middle, strict=True)) for gpu in apart}
    return _never_falling(_filled(curve)), apart


def _mean_apart(points: Mapping[int, float], curve: Mapping[int, float], shared: set[int], size: int) -> float:
    near = [points[x] - curve[x] for x in points if abs(x - size) <= FACTOR_REACH and x in shared]
    return fmean(near) if near else 0.0


def _filled(curve: Mapping[int, float]) -> dict[int, float]:
    """Every size: straight lines over gaps, the same time below the smallest, the same bandwidth above the largest."""
    known = sorted(curve)
    filled = {}
    for size in SIZES:
        below = max((x for x in known if x <= size), default=None)
        above = min((x for x in known if x >= size), default=None)
        if below is None or above is None:
            filled[size] = curve[known[0]] if below is None else curve[known[-1]] + size - known[-1]
        else:
            share = (size - below) / (above - below) if above > below else 0.0
            filled[size] = curve[below] + share * (curve[above] - curve[below])
    return filled


def _never_falling(curve: Mapping[int, float]) -> dict[int, float]:
    """The nearest curve that does not fall: sizes that would make it fall share their mean (isotonic regression)."""
    pools: list[list[float]] = []
    for size in sorted(curve):
        pools.append([curve[size]])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            larger = pools.pop()
            pools[-1] += larger
    return dict(zip(sorted(curve), (fmean(pool) for pool in pools for _ in pool), strict=True))


def predicted(table: Mapping[str, Any], key: Key) -> dict[int, float]:
    """What overlapkit makes of the table: log2 bytes -> log2 seconds."""
    gpu, op, ranks = key
    family = FAMILY[gpu]
    seconds = log_seconds(table, family, gpu, _nvlink(family), op, ranks)
    return dict(zip(SIZES, (value / log(2) for value in seconds), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """A prediction's relative error at one measured point."""

    gpu: str
    log2_bytes: int
    relative: float


def _error(table: Mapping[str, Any], key: Key, size: int, measured: float) -> Error:
    return Error(gpu=key[0], log2_bytes=size, relative=2.0 ** (predicted(table, key)[size] - measured) - 1)


def in_sample(table: Mapping[str, Any], judged: Points) -> Iterator[Error]:
    for key, points in judged.items():
        for size, measured in points.items():
            yield _error(table, key, size, measured)


def _inner(points: Mapping[int, float]) -> list[int]:
    """The sizes that lie between others: leaving out the first or last asks what is beyond the table."""
    return sorted(points)[1:-1]


def leaving_one_out(points: Points, judged: Points) -> Iterator[Error]:
    """Each judged point, predicted by curves built from all points but it."""
    for key in judged:
        family = {k: v for k, v in points.items() if FAMILY[k[0]] == FAMILY[key[0]] and k[1:] == key[1:]}
        for size in _inner(points[key]):
            if size in judged[key]:
                rest = {x: y for x, y in points[key].items() if x != size}
                yield _error(fit({**family, key: rest}), key, size, judged[key][size])


def leaving_gpus_out(points: Points) -> Iterator[Error]:
    """Each GPU, predicted by the curves of its family's others."""
    for gpu, family in FAMILY.items():
        others = {key: value for key, value in points.items() if key[0] != gpu and FAMILY[key[0]] == family}
        table = fit(others)
        yield from in_sample(table, {key: value for key, value in points.items() if key[0] == gpu and others})


def interpolating(points: Points, judged: Points) -> Iterator[Error]:
    """The baseline: each judged point between its neighbours in the GPU's own table, on a straight line."""
    for key in judged:
        known = points[key]
        for size in _inner(known):
            if size in judged[key]:
                line = _filled({x: y for x, y in known.items() if x != size})[size]
                yield Error(gpu=key[0], log2_bytes=size, relative=2.0 ** (line - judged[key][size]) - 1)


def report(points: Points, judged: Points) -> None:
    other = {
        key: {size: y for size, y in values.items() if size not in judged.get(key, {})}
        for key, values in points.items()
    }
    print("mean absolute error of NCCL's latency in %: by message size, and from 1 MiB by GPU")
    print(f"{'':58}{'all':>6}{'1 MiB+':>8}{'16 MiB+':>9}{'points':>8}  " + "".join(f"{gpu:>7}" for gpu in FAMILY))
    _line("the shipped curves at the table's points", in_sample(json.loads(DATA.read_text()), judged))
    _line("the shipped curves at the package's other points", in_sample(json.loads(DATA.read_text()), other))
    _line("one of the table's points left out", leaving_one_out(points, judged))
    _line("one point of the package left out", leaving_one_out(points, points))
    _line("  a straight line between its neighbours instead", interpolating(points, points))
    _line("one GPU left out", leaving_gpus_out(points))
    _line("built from the table alone: the package's other points", in_sample(fit(judged), other))
    _line("built from the table alone: one of its points left out", leaving_one_out(judged, judged))
    _line("  a straight line between its neighbours instead", interpolating(judged, judged))


def _line(name: str, errors: Iterable[Error]) -> None:
    found = list(errors)
    large = [error for error in found if error.log2_bytes >= MIB]
    gpus = [_mean(error for error in large if error.gpu == gpu) for gpu in FAMILY]
    columns = (
        f"{_mean(found):>6}{_mean(large):>8}{_mean(e for e in large if e.log2_bytes >= MIB + 4):>9}{len(large):>8}"
    )
    print(f"{name:58}{columns}  " + "".join(f"{gpu:>7}" for gpu in gpus))


def _mean(errors: Iterable[Error]) -> str:
    found = [abs(error.relative) for error in errors]
    return f"{100 * fmean(found):.1f}" if found else "–"


def text_of(table: Mapping[str, Any]) -> str:
    """JSON with one line for each curve."""
    encoder = json.JSONEncoder(separators=(",", ": "))

    def lines(value: Any, indent: str) -> str:
        if not isinstance(value, dict):
            return encoder.encode(value)
        inner = ",\n".join(f'{indent} "{key}": {lines(item, indent + " ")}' for key, item in value.items())
        return "{\n" + inner + "\n" + indent + "}"

    return lines(table, "") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", nargs="?", type=Path, help="the wheel, or a folder that it was unpacked in")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the committed file differs")
    parser.add_argument("--leave-one-out", metavar="TABLE", type=Path, help="print errors at the points of this table")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            points = read_package(arguments.package or _download(Path(folder)))
        table = read_table(arguments.leave_one_out) if arguments.leave_one_out else None
    except (ImportError, KeyError, OSError, ValueError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
        sys.exit(f"the tables cannot be read: {error}")
    if table is not None:
        report(points, table)
        return 0
    text = text_of(fit(points))
    if not arguments.check:
        DATA.write_text(text, encoding="utf-8")
        return 0
    same = DATA.read_text(encoding="utf-8") == text
    print(f"{DATA.name} " + ("is what the package's tables give" if same else "differs: write it again"))
    return 0 if same else 1


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
