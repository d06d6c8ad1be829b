"""A table of userbuffers that a person can read: what overlaps with what, how, on how many SMs, of how many bytes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from overlapkit.errors import printable
from overlapkit.userbuffers.buffers import Buffer, nbytes
from overlapkit.userbuffers.layers import BULK, EXTERNAL_METHODS, PIPELINE, RING

if TYPE_CHECKING:
    from rich.console import Console

_LINEARS = {"qkv": "QKV", "proj": "proj", "fc1": "FC1", "fc2": "FC2"}
_PASSES = {"fprop": "forward", "dgrad": "dgrad", "wgrad": "wgrad"}
# As a layer runs: forward, then backward from the last linear to the first.
_ORDER = (
    *("qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop"),
    *("fc2_dgrad", "fc2_wgrad", "fc1_dgrad", "fc1_wgrad", "proj_dgrad", "proj_wgrad", "qkv_dgrad", "qkv_wgrad"),
)


_BELOW = " " * 4


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def write_buffers(
    out: Console,
    buffers: Mapping[str, Buffer],
    *,
    tensor_model_parallel_size: int,
    tokens: int | None,
    hidden_size: int | None,
    named: Container[str],
) -> None:
    """A row per buffer; a star marks those that are not ``named``, and so have Transformer Engine's defaults."""
    rows = []
    for name, buffer in sorted(buffers.items(), key=lambda item: _place(item[0])):
        layer = name.partition("@")[0]
        size = ""
        if tokens is not None and hidden_size is not None:
            tp = tensor_model_parallel_size
            size = mib(nbytes(buffer, tokens=tokens, hidden_size=hidden_size, tensor_model_parallel_size=tp))
        collective, gemm = _what(layer, buffer)
        star = "" if name in named else " *"
        sms = f"{buffer['num_sm']}{', kept free' if buffer['set_sm_margin'] else ''}"
        rows.append(
            [f"{name}{star}", collective, gemm, _how(buffer), sms, "FP8" if buffer["dtype"] == "u8" else "", size]
        )
    write_table(out, ["layer", "collective", "beside GEMM", "how", "SMs", "", "buffer"], rows, right=("buffer",))
    if any(name not in named for name in buffers):
        out.print("* no entry: Transformer Engine's own default")


def write_table(
    out: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Container[str] = ()
) -> None:
    """Aligned columns; those of ``right`` end together. A narrow terminal has a row's last columns on lines below."""
    from rich.cells import cell_len

    from overlapkit.render.text import PIPED_WIDTH

    cells = [list(titles), *([printable(cell, limit=300) for cell in row] for row in rows)]
    widths = [max(cell_len(row[index]) for row in cells) for index in range(len(titles))]
    parts = _parts(widths, out.width) if out.width < PIPED_WIDTH else [slice(None)]
    lines = []
    for row in cells:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        padded = [
            blank + cell if title in right else cell + blank
            for cell, blank, title in zip(row, blanks, titles, strict=True)
        ]
        below = ("  ".join(padded[part]).rstrip() for part in parts)
        lines.append(f"\n{_BELOW}".join(line for line in below if line))
    if any(titles):
        out.print(lines[0], style="bold", soft_wrap=True)
    if rows:
        out.print("\n".join(lines[1:]), soft_wrap=True)


def _parts(widths: Sequence[int], room: int) -> list[slice]:
    """The columns that stand on one line, and those on each line below it."""
    starts, used = [0], 0
    for index, width in enumerate(widths):
        if index and used + 2 + width > room:
            starts.append(index)
            used = len(_BELOW) + width
        else:
            used += width + (2 if index else 0)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _place(name: str) -> tuple[str, int]:
    """Modes one after the other, each in the order of `_ORDER`."""
    layer, _, mode = name.partition("@")
    return mode, _ORDER.index(layer)


def _what(layer: str, buffer: Buffer) -> tuple[str, str]:
    """The collective and the GEMM beside it. Source: transformer-engine pytorch/module/_common.py and linear.py."""
    linear, _, step = layer.partition("_")
    gemm = f"{_LINEARS[linear]} {_PASSES[step]}"
    reduces = buffer["is_reduce_scatter"]
    if layer in EXTERNAL_METHODS:
        return "all-gather for MXFP8's wgrad", f"{_LINEARS[linear]} {_PASSES['dgrad']}"
    if step == "fprop":
        return ("reduce-scatter of output" if reduces else "all-gather of input"), gemm
    if step == "wgrad":
        return ("reduce-scatter of input gradient" if reduces else "none: dgrad reduces"), gemm
    if linear in ("proj", "fc2"):
        return "all-gather of output gradient", gemm
    return ("reduce-scatter of input gradient" if reduces else "all-gather of input, for wgrad"), gemm


def _how(buffer: Buffer) -> str:
    method = buffer["method"]
    if method == RING:
        words = ["ring exchange", "copy engines" if buffer["use_ce"] else "kernels"]
        words += ["in pairs"] if buffer["aggregate"] else []
    elif method == PIPELINE:
        words = ["pipeline", f"{buffer['num_splits']} splits"]
    else:
        words = [printable(str(method)) if method != BULK else "bulk"]
    words += ["atomic"] if buffer["atomic_gemm"] else []
    return ", ".join(words)
