"""What a damaged gzip file still gives: zlib throws away all that it made in the call that meets the damage."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zlib import _Decompress


def up_to_damage(member: _Decompress, packed: bytes) -> Iterator[bytes]:
    """All that comes before the damage in ``packed``, byte for byte, at most 64 KiB at a time.

    ``member`` is as it was before the call that met it.
    """
    for size in (1 << 16, 1 << 8):
        while True:
            before = member.copy()
            try:
                block = member.decompress(packed, size)
            except zlib.error:
                member = before
                break
            packed = member.unconsumed_tail
            if not block:
                return
            yield block
    for at in range(len(packed)):
        try:
            yield member.decompress(packed[at : at + 1])
        except zlib.error:
            return
