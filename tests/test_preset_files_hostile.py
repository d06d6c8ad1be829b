"""Hostile files through ``presets check`` and ``diff``: exit code, one clear line, bounded memory and time."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from test_hostile_command import LAUGHS, folder, overlapkit  # noqa: F401  the fixture is for this file too

from overlapkit.presets.literal import NO_LITERAL, read_literal

pytestmark = pytest.mark.slow

BULK = b"{method: bulk, num_sm: 2}"
LAYER = b"qkv_dgrad: " + BULK + b"\n"
WHAT = "a userbuffers configuration is a mapping of layers, this is "
NOT_ONE = "not a userbuffers configuration; its keys are layers such as qkv_fprop"
# name: (the file's bytes, or what is given in its place; the exit code of check; what the one line says)
FILES: dict[str, tuple[bytes | str, int, str]] = {
    # no configuration
    "empty": (b"", 2, "the file is empty"),
    "null": (b"null\n", 2, WHAT + "null"),
    "a list": (b"- 1\n- 2\n", 2, WHAT + "a list; a list holds one mapping per quantization mode"),
    "a list of Python": (b"[1, 2]", 2, WHAT + "a list"),
    "three modes": (b"[{}, {}, {}]", 2, WHAT + "a list"),
    "a list of nothing": (b"[]", 2, WHAT + "a list"),
    "a tuple of Python": (b"(None,)", 0, ""),
    "a single value": (b"root:x:0:0:root:/root:/bin/bash\n", 2, WHAT + "a single value"),
    "a number": (b"4", 2, WHAT + "a single value"),
    "unknown layers only": (b"qkv_forward: " + BULK + b"\n", 2, NOT_ONE),
    "a secret": ("secret.yaml", 2, "secret.yaml: " + NOT_ONE),
    "a recipe": (b"model: {num_layers: 8}\n", 2, NOT_ONE),
    "a recipe that says auto": (
        b"comm_overlap: {tp_comm_overlap_cfg: auto}\n",
        2, ":1: comm_overlap.tp_comm_overlap_cfg: 'auto' holds no layers",
    ),
    "a recipe without a configuration": (b"comm_overlap: {tp_comm_overlap: true}\n", 2, "no tp_comm_overlap_cfg"),
    "a recipe with another file": (b"comm_overlap: {tp_comm_overlap_cfg: /etc/passwd}\n", 2, "holds no layers"),
    # names and files
    "a name that is none": ("nothing", 2, "'nothing' is neither a preset nor a file"),
    "no name": ("", 2, "'' is neither a preset nor a file"),
    "a missing file": ("missing.yaml", 2, "missing.yaml: cannot be read: No such file or directory"),
    "a folder": ("folder", 2, "folder: not a regular file"),
    "a pipe nobody writes to": ("./pipe", 2, "not a regular file"),
    "an endless device": ("/dev/zero", 2, "not a regular file"),
    "a link to itself": ("./loop", 2, "cannot be read"),
    "a name of 5,000 characters": ("x" * 5000, 2, "is neither a preset nor a file"),
    "a path of 5,000 characters": ("/" + "x" * 5000, 2, "File name too long"),
    "a name with NUL, escaped": ("a\x1b[2J", 2, "'a\\x1b[2J' is neither"),
    # bytes
    "10 MB": (LAYER + b"# " + b"x" * 10_000_000, 2, "larger than 256 KB"),
    "10 GB of nothing": ("./sparse", 2, "larger than 256 KB"),
    "invalid UTF-8": (LAYER + b"# \xff\n", 2, ":2: byte"),
    "an executable": (b"\x7fELF\x02\x01\x01\x00\x00", 2, "is not allowed in YAML"),
    "NUL": (LAYER + b"a: \x00\n", 2, ":2: the character U+0000"),
    "tabs": (b"qkv_dgrad:\n\tnum_sm: 8\n", 2, ":2: not YAML"),
    "not YAML": (b"qkv_dgrad: {method: bulk\n", 2, "not YAML"),
    "an unclosed quote": (b'{"' + b"x" * 200_000, 2, "not YAML"),
    # depth, size, aliases
    "10,000 lists in each other": (b"[" * 10_000, 2, ":1: "),
    "10,000 mappings in each other": (b"{'a': " * 10_000, 2, ":1: "),
    "60 levels of Python": (b"{'qkv_fprop': " + b"(" * 60 + b"1" + b",)" * 60 + b"}", 2, ":1: "),
    "100,000 signs before a number": (b"{'qkv_fprop': " + b"-" * 100_000 + b"1}", 2, "expected a mapping of options"),
    "a sum of 50,000": (b"{'qkv_fprop': " + b"1+" * 50_000 + b"1}", 2, "expected a mapping of options"),
    "50,000 texts in a row": (b"{'qkv_fprop': " + b"'a'" * 50_000 + b"}", 2, ""),
    "10,001 values": (LAYER + b"a: [" + b"1," * 10_001 + b"]", 2, "more than 10,000 values"),
    "a billion laughs": (b"a: &a [1,1,1,1,1,1,1,1,1]\n" + LAUGHS, 2, "aliases expanded"),
    "an alias in what it names": (b"qkv_fprop: &a {b: *a}\n", 2, "*a stands inside what it names"),
    "aliases of a layer": (b"qkv_dgrad: &a " + BULK + b"\nfc1_dgrad: *a\nfc1_wgrad: {<<: *a, num_sm: 4}\n", 0, ""),
    "a key given twice": (LAYER + LAYER, 2, ":2: the key 'qkv_dgrad' is given twice"),
    "a key given twice in JSON": (b'{"qkv_dgrad": {"num_sm": 4},\n "qkv_dgrad": {}}', 2, ":2: the key 'qkv_dgrad'"),
    "a key given twice in Python": (b"{'qkv_dgrad': {'num_sm': 2, 'num_sm': True}}", 2, "the key 'num_sm' is given"),
    "a second document": (LAYER + b"---\n" + LAYER, 2, ":2: a second YAML document"),
    # values
    "a number as text": (b'qkv_dgrad: {num_sm: "4"}\n', 2, ":1: qkv_dgrad.num_sm: expected a whole number, got '4'"),
    "a number as text in JSON": (b'{"qkv_dgrad":\n {"num_sm": "4"}}\n', 2, "qkv_dgrad.num_sm: expected a whole number"),
    "a flag as text": (b"qkv_dgrad: {set_sm_margin: 'false'}\n", 2, "set_sm_margin: expected true or false, got"),
    "an option that is a flag": (b"qkv_dgrad: {on: 2}\n", 2, ":1: qkv_dgrad: an option's name is text, got true"),
    "half an SM": (b"qkv_dgrad: {num_sm: 2.5}\n", 2, "qkv_dgrad.num_sm: expected a whole number, got 2.5"),
    "a number of SMs that is true": (b"qkv_dgrad: {num_sm: true}\n", 2, "expected a whole number, got true"),
    "5,000 digits": (b"{'qkv_dgrad': {'num_sm': " + b"9" * 5000 + b"}}", 2, "not a number"),
    "60 digits in Python": (b"{'qkv_dgrad': {'num_sm': " + b"9" * 50 + b"}}", 2, "expected a whole number"),
    "infinity": (b"{'qkv_dgrad': {'set_sm_margin': 1e999}}", 2, "expected a plain value, got inf"),
    "a layer that is text": (b"qkv_dgrad: bulk\n", 2, ":1: qkv_dgrad: expected a mapping of options, got 'bulk'"),
    "a layer that is a list": (b"qkv_dgrad: [1]\n", 2, "expected a mapping of options, got a list of 1 items"),
    "options in options": (b"qkv_dgrad: {num_sm: {a: 1}}\n", 2, "expected a plain value, got a mapping of 1 keys"),
    "a size that is text": (b"hidden_size: big\nuserbuffers: {qkv_dgrad: " + BULK + b"}\n", 2, ":1: hidden_size: exp"),
    "a negative TP": (
        b"comm_overlap: {tp_comm_overlap_cfg: {qkv_dgrad: " + BULK + b"}}\nmodel: {tensor_model_parallel_size: -4}\n",
        2, ":2: model.tensor_model_parallel_size: expected a whole number of at least 1, got -4",
    ),
    "sizes near 64 bits": (
        b"tensor_model_parallel_size: 8\nhidden_size: 9223372036854775807\nseq_length: 9223372036854775807\n"
        b"micro_batch_size: 9223372036854775807\nuserbuffers: {qkv_dgrad: " + BULK + b"}\n",
        2, "tokens: expected a whole number",
    ),
    # what only decisions say
    "an unknown layer beside a known": (LAYER + b"qkv_fprob: {}\n", 0, ""),
    "an unknown option": (b"qkv_dgrad: {number_of_sms: 4}\n", 1, ""),
    "an unknown method": (b'qkv_fprop: {method: "\\e[31mred"}\n', 1, ""),
    "0 SMs": (b"qkv_dgrad: {num_sm: 0}\n", 1, ""),
    "-2,147,483,648 splits": (b"proj_fprop: {num_splits: -2147483647}\n", 0, ""),
    # code
    "a call": (b"qkv_dgrad: !!python/object/apply:os.system [touch hacked]\n", 2, ":1: "),
    "Python that is no literal": (b"{'qkv_dgrad': __import__('os').system('touch hacked')}", 2, ":1: "),
    "a text of Python": (b"{'qkv_dgrad': {'method': f'{open(\"hacked\", \"w\")}'}}", 2, ":1: "),
    "an assignment": (b"ub_cfgs = {'qkv_dgrad': {'num_sm': 2}}\n", 2, "; of Python, the dict alone is read"),
    "a forged line": (b'"x\\noverlapkit: all is well": {}\nqkv_fprop: {num_sm: x}\n', 2, "qkv_fprop.num_sm"),
}  # fmt: skip


def one_clear_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.stdout == "" and says in done.stderr
    assert done.stderr.startswith("overlapkit: ")
    assert done.stderr.endswith("\n") and done.stderr[:-1].isprintable()
    assert len(done.stderr) < 1000


def written(name: str, folder: Path) -> str:  # noqa: F811
    content = FILES[name][0]
    if isinstance(content, str):
        return content
    path = f"preset{list(FILES).index(name)}.yaml"
    (folder / path).write_bytes(content)
    return path


@pytest.mark.parametrize("name", FILES)
def test_file(name: str, folder: Path) -> None:  # noqa: F811
    _, exit_code, says = FILES[name]
    done = overlapkit(folder, "presets", "check", written(name, folder))
    assert done.returncode == exit_code, done.stderr[-500:]
    if exit_code == 2:
        one_clear_line(done, says)
    else:
        assert done.stderr == ""
        assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert "HUSH" not in done.stdout + done.stderr and "root:" not in done.stdout + done.stderr
    assert not (folder / "hacked").exists()


@pytest.mark.parametrize("name", ["a secret", "10 MB", "a billion laughs", "a number as text", "a folder"])
def test_diff_reads_them_the_same_way(name: str, folder: Path) -> None:  # noqa: F811
    one_clear_line(overlapkit(folder, "presets", "diff", *[written(name, folder)] * 2), FILES[name][2])


@pytest.mark.parametrize(
    "text",
    [
        "{1: 2",
        "{1: 2}}",
        "{1, 2}",
        "{[1]: 2}",
        "1",
        "'a'",
        "{'a': 1 + 2}",
        "{'a': - 1}",
        "{'a': b'x'}",
        "{'a': x}",
        "{'a': '''x\ny'''}",
        "{'a': \"\\N{NO SUCH}\"}",
        "{'a': 0777}",
        "{'a': Trueish}",
        "[" * 51 + "]" * 51,
        "[" + "1," * 20_001 + "]",
    ],
)
def test_what_is_no_literal(text: str) -> None:
    assert read_literal(text) is NO_LITERAL


def test_a_literal() -> None:
    text = "# TE\n{'a': {\"b\": (False,), 'c': -1, 'd': 1e3, 'e': None, 'f': 'it\\'s'},  # more\n}\n"
    assert read_literal(text) == {"a": {"b": (False,), "c": -1, "d": 1e3, "e": None, "f": "it's"}}
    assert read_literal("[" * 50 + "]" * 50) is not NO_LITERAL
