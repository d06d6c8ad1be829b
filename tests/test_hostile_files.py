"""Real recipes with bytes put in, cut out and moved: an answer or one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st
from test_hostile import BASES, ROOT, little_memory, try_examples  # noqa: F401  the fixture is for this file too

from overlapkit import Plan, resolve

pytestmark = pytest.mark.slow

BYTES = [b"\x00", b"\xff\xfe", b"\xc3", b"\xef\xbb\xbf", b"\x1b[2J"]
VALUES = [b"1", b"2", b"3", b"8", b"0", b"-1", b"auto", b"true", b"false", b"null", b"{}", b"[]", b"[1, 2]", b"'2.10'"]
SNIPPETS = [
    b"\r\n", b"\t", b"\n", b"\n  ", b": ", b"- ", b"? ", b"{", b"}", b"[", b"]", b"'", b'"', b"#", b"&a ", b"*a",
    b"<<: *a", b"<<: 1", b"!!python/object/apply:os.system [id]", b"!!binary x", b"!<tag:x> ", b"\n---\n",
    b"\n...\n", b"%TAG ! x\n", b"| \n", b"> \n", b"~", b".nan", b"-.inf", b"0x", b"0b2", b"1:2:3", b"1" * 5000,
    b"1e999999999", b"-9223372036854775809", b"[" * 10_000, b"{a: " * 10_000, b"a: &a [*a]\n", b"${oc.env:HOME}",
    b"&x [" + b"1," * 99 + b"]", b"[*x,*x,*x]", b"model: {}\n", b"comm_overlap: null\n", b"? [a]\n: b\n",
    b"\xe2\x80\xa8", b"=", b"on", b"null: 1\n", b"1: 2\n", b"y" * 300_000,
]  # fmt: skip


@st.composite
def mutated_file(draw: st.DrawFn, text: bytes) -> bytes:
    """Bytes put in, cut out, copied to another place, or a value replaced."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 200)))
        snippet = draw(st.one_of(st.sampled_from(VALUES), st.sampled_from(SNIPPETS), st.sampled_from(SNIPPETS + BYTES)))
        what = draw(st.sampled_from(["insert", "cut", "copy", "line", "value", "value", "value"]))
        if what == "insert":
            text = text[:at] + snippet + text[at:]
        elif what == "cut":
            text = text[:at] + text[end:]
        elif what == "copy":
            text = text[:end] + text[at:end] + text[end:]
        elif what == "line":
            start = text.rfind(b"\n", 0, at) + 1
            text = text[:start] + snippet + text[start:]
        else:
            colon = text.find(b": ", at)
            stop = text.find(b"\n", colon)
            text = text if colon < 0 else text[: colon + 2] + snippet + text[stop:]
    return text


@pytest.mark.parametrize("base", BASES)
def test_file(base: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    written = ROOT / "recipes" / f"{base}.yaml"
    text = written.read_bytes() if written.exists() else yaml.safe_dump(BASES[base], sort_keys=False).encode()

    def answer(data: bytes) -> Plan:
        path.write_bytes(data)
        return resolve(path)

    try_examples(mutated_file(text), answer)
