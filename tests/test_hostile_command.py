"""Hostile files through the command: exit code, one clear line, within 500 MB of memory and 2 s of processor time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MEMORY_KB = 500 * 1024
SECONDS = 2
GOOD = b"cluster: {gpu: h100, num_gpus: 8}\nmodel: {num_layers: 8, hidden_size: 8192}\n"
MODEL = b"cluster: {gpu: h100, num_gpus: 8}\nmodel: "
CFG = GOOD + b"comm_overlap: {tp_comm_overlap: true, tp_comm_overlap_cfg: %s}\n"
DUMP = b"_target_: x\ncluster: {gpu: h100, num_gpus: 8}\nmodel: {_target_: y}\n"
ENV = GOOD + b"env_vars:\n"
LAUGHS = b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(ord("b"), ord("k")))
MAPPINGS = b"".join(b"x%d: {a: '${x%d}', b: '${x%d}'}\n" % (n, n - 1, n - 1) for n in range(1, 40))
TEXTS = b"".join(b"  A%d: ${env_vars.A%d}${env_vars.A%d}\n" % (n, n - 1, n - 1) for n in range(1, 40))
HUGE = b"num_layers: 9223372036854775807, mtp_num_layers: 9223372036854775807, hidden_size: 9223372036854775807"

# name: (the file's bytes, or an entry of the folder below; the exit code; what the one line says)
FILES: dict[str, tuple[bytes | str, int, str]] = {
    # not a recipe at all
    "empty": (b"", 2, "the file is empty"),
    "only comments": (b"# nothing\n", 2, "the file is empty"),
    "a list": (b"- 1\n- 2\n", 2, "a recipe is a mapping of sections"),
    "a single value": (b"root:x:0:0:root:/root:/bin/bash\n", 2, "this is a single value"),
    "an executable": (b"\x7fELF\x02\x01\x01\x00\x00", 2, "is not allowed in YAML"),
    "a missing file": ("missing.yaml", 2, "No such file or directory"),
    "a folder": ("folder", 2, "not a regular file"),
    "a pipe nobody writes to": ("pipe", 2, "not a regular file"),
    "an endless device": ("/dev/zero", 2, "not a regular file"),
    "a link to itself": ("loop", 2, "cannot be read"),
    "a name of 5,000 characters": ("x" * 5000, 2, "File name too long"),
    # bytes
    "10 MB": (b"# " + b"x" * 10_000_000, 2, "larger than 256 KB"),
    "10 GB of nothing": ("sparse", 2, "larger than 256 KB"),
    "invalid UTF-8": (GOOD + b"# \xff\n", 2, ":3: byte"),
    "UTF-16": (GOOD.decode().encode("utf-16"), 2, "is not UTF-8"),
    "NUL": (GOOD + b"a: \x00\n", 2, ":3: the character U+0000"),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD, 0, ""),
    "line ends of Windows": (GOOD.replace(b"\n", b"\r\n"), 0, ""),
    "tabs": (b"model:\n\tnum_layers: 8\n", 2, ":2: not YAML"),
    "an unclosed quote": (b'a: "' + b"x" * 200_000, 2, "not YAML"),
    "half of a surrogate pair": (b'a: "\\ud800"\n', 2, "not YAML"),
    # depth and size
    "10,000 lists in each other": (b"a: " + b"[" * 10_000, 2, ":1: "),
    "10,000 mappings in each other": (b"{a: " * 10_000, 2, ":1: "),
    "60 levels": (b"a: " + b"[" * 60 + b"]" * 60, 2, "nested deeper than 50 levels"),
    "10,001 values": (b"a: [" + b"1," * 10_001 + b"]", 2, "more than 10,000 values"),
    "9,900 values": (DUMP + b"foo: [" + b"1," * 9_900 + b"]\n", 0, ""),
    "a key of 130 KB above thousands": (b"? " + b"k" * 130_000 + b"\n: [" + b"{a: 1}," * 4000 + b"]", 2, "more than"),
    "a key of 130 KB": (b"? " + b"k" * 130_000 + b"\n: 1", 2, "unknown section"),
    "5,000 unknown keys": (b"model:\n" + b"".join(b"  k%d: 1\n" % n for n in range(4900)), 2, ":2: model.k0: unknown"),
    # aliases and merges
    "a billion laughs": (b"a: &a [1,1,1,1,1,1,1,1,1]\n" + LAUGHS, 2, "aliases expanded"),
    "an alias in what it names": (b"a: &a [*a]\n", 2, "*a stands inside what it names"),
    "an alias to nothing": (b"a: *b\n", 2, "*b names no anchor"),
    "merged a thousand times": (b"a: &a {b: 1}\nc: {<<: [" + b"*a," * 4000 + b"]}\n", 2, "aliases expanded"),
    "a merge of a number": (b"model: {<<: 1}\n", 2, "merges mappings only"),
    "a merge": (b"x: &x {num_layers: 8}\n" + MODEL + b"{<<: *x}\n", 2, "x: unknown section"),
    # references
    "a reference to itself": (MODEL + b"{num_layers: '${model.num_layers}'}\n", 2, "goes in a circle"),
    "a circle of references": (ENV + b"  A: ${env_vars.B}\n  B: ${env_vars.A}\n", 2, "goes in a circle"),
    "a mapping in itself": (DUMP + b"a: {b: {c: '${a}'}}\n", 2, "goes in a circle"),
    "text that doubles": (ENV + b"  A0: xx\n" + TEXTS, 2, "references"),
    "mappings that double": (DUMP + b"x0: {a: 1}\n" + MAPPINGS, 2, "references"),
    "6,600 references": (DUMP + b"a: [" + b"'${cluster.gpu}${cluster.gpu}'," * 3300 + b"]\n", 2, "1,000 references"),
    "a resolver": (ENV + b"  A: ${oc.env:SECRET}\n", 2, "the resolver ${oc.env:…} is not run"),
    "a resolver behind backslashes": (ENV + rb"  A: \\${oc.env:SECRET}" + b"\n", 2, "the resolver ${oc.env:…}"),
    "a resolver with braces": (ENV + b"  A: '${oc.env:SECRET,\"{}\"}'\n", 2, "the resolver ${oc.env:…}"),
    # numbers
    "a number of 5,000 digits": (MODEL + b"{num_layers: " + b"9" * 5000 + b"}\n", 2, "not a number that can be read"),
    "a number to the base of 60": (MODEL + b"{num_layers: " + b"1:" * 120_000 + b"1}\n", 2, "not a number"),
    "200,000 hexadecimal digits": (MODEL + b"{num_layers: 0x" + b"f" * 200_000 + b"}\n", 2, "not a number"),
    "1e999999999": (MODEL + b"{num_layers: 1e999999999}\n", 2, "model.num_layers: expected a whole number"),
    "more than 64 bits": (MODEL + b"{num_layers: 9223372036854775808}\n", 2, "beyond 64 bits"),
    "all sizes 2**63 - 1": (MODEL + b"{" + HUGE + b"}\n", 0, ""),
    "a negative size": (MODEL + b"{num_layers: -8}\n", 2, ":2: model.num_layers: expected"),
    # structure
    "a key given twice": (GOOD + b"model: {}\n", 2, ":3: the key 'model' is given twice"),
    "a second document": (GOOD + b"---\n" + GOOD, 2, ":3: a second YAML document"),
    "a list as key": (b"? [a]\n: 1\n", 2, "a key must be text"),
    "every section null": (b"cluster:\nmodel:\ntrain:\ncomm_overlap:\nsoftware:\n", 2, "cluster.num_gpus"),
    "every section a list": (b"model: []\ncluster: []\n", 2, "expected a mapping"),
    # code and files
    "a call of os.system": (b"a: !!python/object/apply:os.system [touch hacked]\n", 2, ":1: the tag"),
    "a tag": (b"a: !<tag:example.org,2026:x> 1\n", 2, ":1: the tag"),
    "a _target_ to run": (DUMP.replace(b" y", b" os.system, _args_: [touch hacked]"), 0, ""),
    "shell in env_vars": (ENV + b"  A: $(touch hacked)\n  \"B;touch hacked\": '`touch hacked`'\n", 0, ""),
    "a preset out of the way": (CFG % b"../../../../../../etc/passwd", 2, "a userbuffers configuration is a mapping"),
    "a preset that is a secret": (CFG % b"./secret.yaml", 2, "secret.yaml: not a userbuffers configuration"),
    "a preset that never ends": (CFG % b"/dev/zero", 0, ""),
    "a preset that never begins": (CFG % b"./pipe", 0, ""),
    "a preset of 10 GB": (CFG % b"./sparse", 2, "larger than 256 KB"),
    # what moves the cursor
    "escape sequences in a key": (b'model: {"\\e[2J\\e[31mred": 1}\n', 2, "\\x1b[2J"),
    "escape sequences in a value": (MODEL + b'{recompute_granularity: "\\e]0;title\\a"}\n', 2, "\\x1b]0;title\\x07"),
    "escape sequences in a plan": (GOOD + b'software: {torch: "2.10\\e[31m"}\n', 2, "\\x1b[31m"),
    "a forged line": (b'"x\\noverlapkit: all is well": 1\n', 2, "x\\noverlapkit: all is well"),
    "text that turns around": ('model: {"\u202enum": 1}\n'.encode(), 2, "\\u202e"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "secret.yaml").write_text("aws: {key: HUSH}\n")
    os.mkfifo(folder / "pipe")
    with (folder / "sparse").open("wb") as sparse:
        sparse.truncate(10 * 1024**3)
    return folder


def overlapkit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command under its limits; what it writes must be UTF-8."""
    limited = f'ulimit -v {MEMORY_KB} -t {SECONDS} && exec "$@"'
    command = ["bash", "-c", limited, "bash", sys.executable, "-m", "overlapkit.cli", *arguments]
    environment = {**os.environ, "SECRET": "HUSH", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=60, check=False
    )


@pytest.mark.parametrize("name", FILES)
def test_file(name: str, folder: Path) -> None:
    content, exit_code, says = FILES[name]
    path = content if isinstance(content, str) else f"{list(FILES).index(name)}.yaml"
    if isinstance(content, bytes):
        (folder / path).write_bytes(content)
    done = overlapkit(folder, "resolve", path, "--fail-on", "never")
    assert done.returncode == exit_code, done.stderr[-500:]
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    if exit_code == 2:
        assert done.stdout == ""
        assert done.stderr.startswith("overlapkit: ")
        assert done.stderr.endswith("\n") and done.stderr[:-1].isprintable()  # one line
        assert len(done.stderr) < 1000
    else:
        assert done.stderr == ""
        assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert "HUSH" not in done.stdout + done.stderr and "root:" not in done.stdout + done.stderr
    assert not (folder / "hacked").exists()


OVERRIDES = [
    "model.num_layers=" + "[" * 5000,
    "a." * 5000 + "b=1",
    "model.num_layers=" + "9" * 5000,
    "env_vars.A=${oc.env:SECRET}",
    "model.fp8=\udcff",
    "\udcff=1",
    "\x1b[2J=1",
    "model.num_layers=!!python/object/apply:os.system [touch hacked]",
    "model={<<: &a [*a]}",
    "x" * 100_000,
]


@pytest.mark.parametrize("override", OVERRIDES, ids=range(len(OVERRIDES)))
def test_override(override: str, folder: Path) -> None:
    (folder / "good.yaml").write_bytes(GOOD)
    done = overlapkit(folder, "resolve", "good.yaml", override)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("overlapkit: command line: ")
    assert done.stderr[:-1].isprintable()
    assert "HUSH" not in done.stderr
    assert not (folder / "hacked").exists()


def test_a_file_name_that_is_no_text(folder: Path) -> None:
    (folder / "b\udcff\n.yaml").write_bytes(GOOD)
    for form in ("text", "json", "yaml", "env"):
        done = overlapkit(folder, "resolve", "b\udcff\n.yaml", "--format", form)
        assert done.returncode == 0
        assert all(line.isprintable() for line in done.stdout.split("\n"))


def test_there_are_enough_files() -> None:
    assert len(FILES) >= 50
