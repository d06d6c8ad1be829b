"""The verbs of ``overlapkit presets`` through the command: what they print, and how they exit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import bash, run
from test_cli_streams import COLOUR, on_a_terminal
from typer.testing import CliRunner

from overlapkit.cli import app
from overlapkit.presets import check_userbuffers, files, load_preset, preset_names
from overlapkit.presets.configurations import named_or_read, read

ROOT = Path(__file__).resolve().parent.parent
H100 = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
H800 = "userbuffers_bf16_h800_h8192_tp4_mbs1_seqlen8192"
H20 = "userbuffers_bf16_h20_h5120_tp8_mbs1_seqlen8192"
NEMO = "userbuffers_fp8_h100_h12288_tp4_mbs1_seqlen2048_nemo"
LORA = "userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora"
QWEN = "recipes/qwen3_32b_8xh20.yaml"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def out(*arguments: str, exit_code: int = 0) -> str:
    """What ``overlapkit presets …`` writes on stdout."""
    result = CliRunner().invoke(app, ["presets", *arguments])
    assert result.exit_code == exit_code, result.output + str(result.exception)
    return result.stdout


def error_of(*arguments: str) -> str:
    done = run("presets", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("overlapkit: ") and done.stderr.count("\n") == 1
    return done.stderr


def names(*arguments: str) -> list[str]:
    return [line.split()[-1] for line in out("list", *arguments).splitlines()[1:]]


def without_tuples(name: str) -> dict[str, Any]:
    return {layer: dict(options) for layer, options in load_preset(name).userbuffers.items()}


# --- list ----------------------------------------------------------------------------------------


def test_the_tuned_come_first_and_the_derived_are_marked() -> None:
    lines = out("list").splitlines()[1:]
    derived = [" derived " in line for line in lines]
    assert sorted(derived) == derived and 0 < sum(derived) < len(derived)
    assert {line.split()[-1] for line in lines} == set(preset_names())


def test_columns_are_aligned() -> None:
    lines = out("list").splitlines()
    assert {line.index(line.split()[-1]) for line in lines} == {lines[0].index("name")}


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--gpu", "h800"], "gpu", "h800"),
        (["--gpu", "NVIDIA H100 80GB HBM3"], "gpu", "h100"),
        (["--precision", "fp8"], "precision", "fp8"),
        (["--tp", "8"], "tensor_model_parallel_size", 8),
        (["--hidden-size", "8192"], "hidden_size", 8192),
        (["--provenance", "nemo"], "provenance", "nemo"),
    ],
)
def test_a_filter_keeps_what_fits_and_all_of_it(options: list[str], field: str, value: Any) -> None:
    expected = {name for name in preset_names() if getattr(load_preset(name), field) == value}
    assert set(names(*options)) == expected != set()
    listed = json.loads(out("list", *options, "--format", "json"))
    assert [preset["name"] for preset in listed] == sorted(expected)


def test_filters_add_up_and_may_leave_nothing() -> None:
    assert names("--gpu", "h20", "--tp", "8", "--hidden-size", "5120", "--precision", "bf16") == [H20]
    assert names("--gpu", "a100", "--precision", "fp8") == []
    assert json.loads(out("list", "--gpu", "a100", "--precision", "fp8", "-f", "json")) == []


def test_an_empty_list_says_where_one_comes_from() -> None:
    done = run("presets", "list", "--tp", "3")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert done.stderr == "no preset is like this; overlapkit presets derive RECIPE computes one\n"


def test_a_gpu_without_presets_has_those_of_the_one_that_it_starts_from() -> None:
    assert set(names("--gpu", "h20_141")) == set(names("--gpu", "h20")) != set()


def test_a_list_reads_no_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(files, "load_preset", refuse)
    monkeypatch.setattr("overlapkit.presets.load_preset", refuse)
    assert len(names()) == len(preset_names())


def test_an_unknown_gpu() -> None:
    assert "'h1000' is not a known GPU; did you mean h100?" in error_of("list", "--gpu", "h1000")


# --- show ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [H100, H20, NEMO])
def test_show(name: str, request: pytest.FixtureRequest) -> None:
    golden = ROOT / "tests" / "presets" / f"{name}.txt"
    text = out("show", name)
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8", newline="\n")
        return
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", preset_names())
def test_show_has_a_row_for_each_layer_and_a_reason_where_one_is_known(name: str) -> None:
    text, preset = out("show", name), load_preset(name)
    rows = [line.split("  ")[0] for line in text.splitlines() if line.endswith(" MiB")]
    assert set(preset.userbuffers) <= set(rows) and len(rows) == 12  # two of MXFP8's, and what a LoRA preset lacks
    assert {row for row in rows if row.endswith(" *")} == {row for row in rows if row not in preset.userbuffers}
    assert text.count("neither tuned nor measured") == preset.derived
    unwrapped = " ".join(text.split())
    for layer, entry in (preset.derivation or {"layers": {}})["layers"].items():
        for part in (layer, str(entry["ratio"]), entry["because"]):
            assert part in unwrapped, (layer, part)


def test_aliases_are_named_and_only_of_tuned_presets() -> None:
    tuned = [preset for preset in map(load_preset, preset_names()) if not preset.derived]
    found = 0
    for preset in tuned:
        same = [other.name for other in tuned if other != preset and other.userbuffers == preset.userbuffers]
        line = f"the same content: {', '.join(same)}\n" if same else "the same content"
        assert (line in out("show", preset.name)) == bool(same), preset.name
        found += bool(same)
    assert found >= 8
    assert "the same content" not in out("show", H20)


# --- check ---------------------------------------------------------------------------------------


def test_a_presets_own_file_says_its_sizes() -> None:
    for what in (H20, f"presets/userbuffers/{H20}.yaml"):
        expected = check_userbuffers(
            load_preset(H20).userbuffers,
            transformer_engine="2.9",
            tensor_model_parallel_size=8,
            tokens=8192,
            hidden_size=5120,
        )
        assert json.loads(out("check", what, "--transformer-engine", "2.9", "-f", "json")) == expected.to_dict()


def test_a_dump_says_its_sizes_too() -> None:
    dump = "tests/dumps/llama3_70b_pretrain_64gpu_h100_bf16.yaml"
    found = read(dump)
    assert (found.tensor_model_parallel_size, found.tokens, found.hidden_size) == (4, 4096, 8192)
    assert found.precision == "bf16"
    assert json.loads(out("check", dump, "-f", "json"))["bytes"] == 12 * 64 * 2**20


def test_nulls_are_kept_for_megatron_lm_and_taken_away_by_bridge(tmp_path: Path) -> None:
    file = tmp_path / "cfg.yaml"
    file.write_text("qkv_fprop: {method: ring_exchange}\nproj_fprop: null\n")
    report = json.loads(out("check", str(file), "-f", "json", exit_code=1))
    assert [(each["code"], each["exception"]) for each in report["decisions"]] == [("UB006", "AttributeError")]
    target = "megatron.bridge.training.comm_overlap.TransformerLayerTPOverlapCfg"
    file.write_text(f"_target_: {target}\nqkv_fprop: {{method: ring_exchange}}\nproj_fprop: null\n")
    out("check", str(file))
    file.write_text(
        f"comm_overlap: {{tp_comm_overlap_cfg: {{_target_: {target}, qkv_fprop: null, fc1_fprop: null}}}}\n"
    )
    out("check", str(file))


def test_a_refusal_is_told_with_the_exception(tmp_path: Path) -> None:
    file = tmp_path / "cfg.yaml"
    file.write_text("qkv_dgrad: {method: ring_exchange}\nqkv_wgrad: {method: bulk}\n")
    text = " ".join(out("check", str(file), exit_code=1).split())
    assert "fails (1 error)" in text and "TP 8 (assumed, --tp)" in text
    assert "initialize_ub raises ValueError: Cannot specify user UB config for 'qkv_wgrad'" in text
    older = json.loads(out("check", str(file), "--transformer-engine", "2.9", "-f", "json", exit_code=1))
    assert (older["decisions"][0]["exception"], older["decisions"][0]["message"]) == ("AssertionError", None)
    out("check", str(file), "--fail-on", "never")


def test_a_warning_fails_only_when_asked_to(tmp_path: Path) -> None:
    file = tmp_path / "cfg.yaml"
    file.write_text("qkv_fprop: {method: ring_exchange}\nqkv_fprob: {method: bulk}\n")
    assert "UB005" in out("check", str(file))
    assert "did you mean qkv_fprop" in out("check", str(file), "--fail-on", "warning", exit_code=1)


def test_options_decide_what_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "cfg.json"
    file.write_text(json.dumps({"fc1_dgrad": {"method": "ring_exchange", "set_sm_margin": False}}))
    out("check", str(file), exit_code=1)  # UB017: without tp_comm_overlap_rs_dgrad there is none
    out("check", str(file), "--rs-dgrad")
    both = ["--rs-dgrad", "--quantization", "fp8,none"]
    report = json.loads(out("check", str(file), *both, "-f", "json", exit_code=1))
    assert [each["code"] for each in report["decisions"]] == ["UB009"]
    assert "two modes are known from Transformer Engine 2.8" in error_of(
        "check", str(file), *both, "--transformer-engine", "2.7"
    )


def test_a_list_has_a_configuration_per_mode(tmp_path: Path) -> None:
    file = tmp_path / "cfg.py"
    file.write_text("[{'qkv_fprop': {'num_sm': 2, 'fp8_buf': (False,)}}, None]  # as Python writes it\n")
    text = out("check", str(file))
    rows = {line.split("  ")[0]: line for line in text.splitlines() if line.startswith("qkv_fprop")}
    assert set(rows) == {"qkv_fprop@fp8", "qkv_fprop@none *"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--transformer-engine", "newest"], "transformer_engine: 'newest' is not a version"),
        (["--transformer-engine", ""], "transformer_engine: '' is not a version"),
        (["--tp", "0"], "tensor_model_parallel_size: expected a whole number of at least 1, got 0"),
        (["--tokens", "-1"], "tokens: expected a whole number of at least 1, got -1"),
        (["--quantization", "FP8,none"], "quantization_modes: expected fp8, none or both, got 'FP8,none'"),
        (["--quantization", ""], "quantization_modes: expected fp8, none or both"),
    ],
)
def test_options_that_say_nothing(options: list[str], says: str) -> None:
    assert says in error_of("check", H100, *options)


@pytest.mark.parametrize(("version", "taken"), [("1.8", "1.9"), ("1.9", None), ("2.20.2", None), ("2.21", "2.20")])
def test_a_version_that_is_not_known_is_taken_for_the_nearest(version: str, taken: str | None) -> None:
    heading = out("check", H100, "--transformer-engine", version).splitlines()[1]
    assert (f" (not known, taken for {taken})" in heading) == (taken is not None) == (" (not known" in heading)


# --- diff ----------------------------------------------------------------------------------------


def test_diff_names_every_option() -> None:
    found = json.loads(out("diff", H100, H800, "--format", "json"))
    assert (found["equal"], found["same_buffers"]) == (False, False)
    assert found["made_for"] == {"gpu": ["h100", "h800"], "provenance": ["bridge", "derived"]}
    one, other = without_tuples(H100), without_tuples(H800)
    for layer, pairs in found["layers"].items():
        for option, (first, second) in pairs.items():
            assert first == one[layer].pop(option) != other[layer].pop(option) == second
    assert one == other
    text = out("diff", H100, H800)
    assert "4 layers differ\n" in text and "qkv_wgrad   num_sm      24      18\n" in text


def test_diff_of_equals(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(out("show", H100, "--format", "megatron-lm"))
    text = out("diff", H100, str(file))
    assert "equal: every layer is the same" in text
    assert f"the same content: {H100}" in text
    assert json.loads(out("diff", H100, H100, "-f", "json"))["equal"] is True


def test_diff_of_what_only_writes_defaults_out(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("qkv_fprop: {method: ring_exchange}\n")
    second.write_text("qkv_fprop: {method: ring_exchange, num_sm: 1, use_ce: true}\nfc1_wgrad: {}\n")
    text = out("diff", str(first), str(second))
    assert "2 layers differ in what is written" in text and "builds the same buffers of both" in text
    assert "qkv_fprop  num_sm  not set  1\n" in text


def test_diff_of_nothing() -> None:
    assert "'userbuffers_x' is neither a preset nor a file" in error_of("diff", H100, "userbuffers_x")
    assert f"did you mean {H100}?" in error_of("diff", H100, H100[:-1] + "1")


# --- derive --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([], H20),
        (["mixed_precision=bf16_with_fp8_delayed_scaling_mixed"], H20.replace("bf16", "fp8")),
        (["cluster.gpu=h800"], H20.replace("h20", "h800")),
        (["model.tensor_model_parallel_size=4"], H20.replace("tp8", "tp4")),
    ],
)
def test_derive_prints_what_is_shipped_for_the_same_shape(changes: list[str], name: str) -> None:
    written = out("derive", QWEN, "model.seq_length=8192", *changes)
    assert written == (ROOT / "presets" / "userbuffers" / f"{name}.yaml").read_text(encoding="utf-8")


def test_derive_uses_the_recipes_own_sizes() -> None:
    own = yaml.safe_load(out("derive", QWEN, "model.ffn_hidden_size=8192", "model.kv_channels=null"))
    sizes = own["derivation"]["sizes"]
    assert (own["derivation"]["model"], sizes["ffn_hidden_size"], sizes["kv_channels"]) == (
        "the recipe's model",
        8192,
        80,
    )
    without = yaml.safe_load(out("derive", QWEN, "model.num_attention_heads=null", "model.ffn_hidden_size=null"))
    assert without["derivation"]["model"] == "Qwen3-32B"


def test_what_is_derived_is_a_preset_that_check_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(out("derive", QWEN, "cluster.gpu=h200"))
    found = named_or_read(str(file))
    assert (found.tokens, found.hidden_size, found.tensor_model_parallel_size) == (16384, 5120, 8)
    out("check", str(file))


@pytest.mark.parametrize("form", ["megatron-lm", "yaml", "te", "bridge", "json", "text"])
def test_derive_writes_what_show_writes(form: str) -> None:
    """Megatron-LM reads no preset's own file, of which Transformer Engine would pass over every layer."""
    assert out("derive", QWEN, "model.seq_length=8192", "--format", form) == out("show", H20, "--format", form)


def test_derive_says_where_a_tuned_preset_is() -> None:
    done = run("presets", "derive", "recipes/llama3_70b_64xh100.yaml")
    assert done.stderr == f"auto would take a tuned preset: {H100}\n"
    assert run("presets", "derive", QWEN).stderr == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["cluster.gpu=null"], "a preset is derived from cluster.gpu, not given"),
        (
            ["model.hidden_size=null", "train.micro_batch_size=null"],
            "model.hidden_size, train.micro_batch_size, not given",
        ),
        (["cluster.gpu=vr200"], "no preset can be derived for vr200"),
        (["model.tensor_model_parallel_size=1"], "kernels for TP 2, 4, 8, 16, 32, not 1"),
        (["cluster.gpu=a100", "mixed_precision=bf16_with_fp8_delayed_scaling_mixed"], "a100 has no FP8"),
        (["model.seq_length=8388608"], "no preset can be derived: qkv_fprop: 10,737,418,240 bytes"),
        (["model.num_moe_experts=8"], "no preset can be derived for a model with experts"),
        (["cluster.gpu=h2000"], "'h2000' is not a known GPU"),
    ],
)
def test_what_cannot_be_derived_is_one_line(changes: list[str], says: str) -> None:
    assert says in error_of("derive", QWEN, *changes)


# --- streams -------------------------------------------------------------------------------------

CHECK_DEFECT = ["check", NEMO, "--tp", "8", "--transformer-engine", "2.9", "--fail-on", "never"]


@pytest.mark.parametrize("arguments", [["show", H100], ["list", "--tp", "2"], CHECK_DEFECT[:-2]], ids=" ".join)
def test_a_terminal_of_80_columns_breaks_no_word_of_a_table(arguments: list[str]) -> None:
    text = COLOUR.sub("", on_a_terminal("presets", *arguments, COLUMNS="80"))
    rows = [line for line in text.splitlines() if line.startswith(("qkv_", "fc2_", "h100 ", "    "))]
    assert len(rows) > 10 and max(map(len, rows)) <= 80


@pytest.mark.parametrize("arguments", [["show", H20], CHECK_DEFECT, ["diff", H100, H800]], ids=" ".join)
def test_colour_width_and_readers(arguments: list[str]) -> None:
    on_terminal = on_a_terminal("presets", *arguments)
    assert "\x1b[" in on_terminal
    assert "\x1b" not in on_a_terminal("presets", *arguments, NO_COLOR="1")
    piped = run("presets", *arguments).stdout
    assert "\x1b" not in piped and all(line == line.rstrip() for line in piped.splitlines())
    narrow = COLOUR.sub("", on_a_terminal("presets", *arguments, COLUMNS="40"))
    assert "…" not in narrow
    assert sorted("".join(narrow.split())) == sorted("".join(piped.split()))
    done = bash(f'"$OVERLAPKIT" presets {" ".join(arguments)} | head -1')
    assert (done.returncode, done.stderr) == (0, "")
