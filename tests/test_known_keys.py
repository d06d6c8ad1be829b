"""The committed list of recipe keys: its shape, facts that hold in the sources, and that it is what they generate."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "known_keys.py"
DATA = ROOT / "overlapkit" / "data" / "known_keys.json"
CORE_16, CORE_19, BRIDGE_3, BRIDGE_6 = "0123"


@pytest.fixture(scope="module")
def sections() -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = json.loads(DATA.read_text("utf-8"))["sections"]
    return sections


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("known_keys_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_snapshots_are_in_the_order_of_their_digits() -> None:
    snapshots = json.loads(DATA.read_text("utf-8"))["snapshots"]
    assert snapshots == [
        "megatron-core 0.16.1",
        "megatron-core 0.19.2",
        "megatron-bridge 0.3.1",
        "megatron-bridge 0.6.2",
    ]


def test_shape(sections: dict[str, dict[str, str]]) -> None:
    assert list(sections) == sorted(sections)
    assert set(sections) == {"", *sections[""]}
    for section, keys in sections.items():
        # OptimizerConfigOverrideProvider is a dataclass without fields: its behaviour is in a method.
        assert bool(keys) == (section != "optimizer_config_override_provider"), section
        assert list(keys) == sorted(keys), section
        for key, snapshots in keys.items():
            assert not key.startswith("_"), (section, key)
            assert snapshots and set(snapshots) <= set("0123"), (section, key)
            assert list(snapshots) == sorted(set(snapshots)), (section, key)
            # Core counts only as what a Bridge inherits from, and a key of Core is one of the Bridge on top of it.
            assert (CORE_16 not in snapshots or BRIDGE_3 in snapshots) and (
                CORE_19 not in snapshots or BRIDGE_6 in snapshots
            ), (section, key)


def test_one_key_on_a_line_and_a_trailing_newline() -> None:
    text = DATA.read_text("utf-8")
    assert text == json.dumps(json.loads(text), indent=1) + "\n"


def test_comm_overlap_has_the_fields_of_comm_overlap_config(sections: dict[str, dict[str, str]]) -> None:
    assert sections["comm_overlap"] == dict.fromkeys(
        [
            "align_param_gather",
            "batch_p2p_comm",
            "bucket_size",
            "data_parallel_size",
            "defer_embedding_wgrad_compute",
            "delay_wgrad_compute",
            "overlap_grad_reduce",
            "overlap_moe_expert_parallel_comm",
            "overlap_p2p_comm",
            "overlap_param_gather",
            "overlap_param_gather_with_optimizer_step",
            "tp_comm_bootstrap_backend",
            "tp_comm_overlap",
            "tp_comm_overlap_cfg",
            "wgrad_deferral_limit",
        ],
        "23",
    )


FACTS = [
    # sections of ConfigContainer
    ("", "model", "23"),
    ("", "env_vars", "3"),
    ("", "validation", "3"),
    ("", "_checkpoint_load_required", None),
    ("env_vars", "*", "3"),
    # ModelParallelConfig and TransformerConfig of Core, which every provider inherits
    ("model", "tensor_model_parallel_size", "0123"),
    ("model", "num_moe_experts", "0123"),
    ("model", "mtp_num_layers", "0123"),
    ("model", "moe_flex_dispatcher_backend", "0123"),
    ("model", "moe_flex_dispatcher_num_sms", "13"),
    ("model", "moe_extended_tp", "02"),
    # MLATransformerConfig, HeterogeneousTransformerConfig
    ("model", "kv_lora_rank", "0123"),
    ("model", "heterogeneous_layers_config_path", "0123"),
    # GPTModelProvider of both Bridges; in Core only since megatron.training has GPTModelConfig
    ("model", "seq_length", "123"),
    ("model", "vocab_size", "123"),
    ("model", "transformer", "13"),
    ("model", "builder", None),  # a ClassVar
    # T5ModelProvider, DistillationProvider, Gemma3ModelProvider, MegatronMIMOProvider
    ("model", "encoder_num_layers", "23"),
    ("model", "kd_config", "23"),
    ("model", "interleaved_attn_pattern", "23"),
    ("model", "megatron_mimo_parallelism_config", "3"),
    ("ddp", "bucket_size", "0123"),
    ("ddp", "preserve_fp32_weights", "02"),
    ("ddp", "fsdp_all_gather_in_start_param_sync", "13"),
    ("optimizer", "overlap_param_gather_with_optimizer_step", "0123"),
    ("optimizer", "muon_use_nesterov", "02"),
    ("optimizer", "muon_nesterov", "13"),
    ("train", "global_batch_size", "123"),
    ("train", "eval_iters", "23"),
    ("validation", "eval_iters", "13"),
    ("rng", "seed", "123"),
    ("dist", "lazy_init", "2"),
    ("dist", "lazy_mpu_init", "13"),
    ("mixed_precision", "grad_reduce_in_fp32", "23"),
    ("mixed_precision", "fp4_param_gather", "3"),
    # Bridge's own name is a parameter of GPTDatasetConfig.__init__, Core's is a field
    ("dataset", "seq_length", "23"),
    ("dataset", "sequence_length", "0123"),
    ("dataset", "skip_getting_attention_mask_from_dataset", "23"),
    ("dataset", "fim_rate", "23"),
    ("dataset", "packed_sequence_specs", "2"),
    ("dataset", "offline_packing_specs", "3"),
    ("dataset", "kwargs", None),
    ("dataset", "self", None),
    # LoRA, CanonicalLoRA, VLMLoRA
    ("peft", "target_modules", "23"),
    ("peft", "a2a_experimental", "23"),
    ("peft", "freeze_vision_model", "23"),
]


@pytest.mark.parametrize(("section", "key", "snapshots"), FACTS)
def test_fact(sections: dict[str, dict[str, str]], section: str, key: str, snapshots: str | None) -> None:
    assert sections[section].get(key) == snapshots


@pytest.mark.network
def test_committed_file_is_what_the_sources_generate() -> None:
    """Set OVERLAPKIT_WHEELS to a folder that has the four wheels to run this without PyPI."""
    result = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


CORE = {
    "megatron/core/__init__.py": "",
    "megatron/core/transformer/transformer_config.py": """
from dataclasses import dataclass
@dataclass
class TransformerConfig:
    hidden_size: int = 0
    _private: int = 0
""",
    "megatron/core/optimizer.py": "from ._config import OptimizerConfig as OptimizerConfig",
    "megatron/core/_config.py": """
import dataclasses
class NotADataclass:
    not_a_field: int = 0
@dataclasses.dataclass
class OptimizerConfig(NotADataclass):
    lr: float = 0.0
    kind: "ClassVar[str]" = "adam"
""",
}
BRIDGE = {
    "megatron/bridge/models/__init__.py": "from .provider import *\nraise RuntimeError('never run')",
    "megatron/bridge/models/model_provider.py": "class ModelProviderMixin: ...",
    "megatron/bridge/models/provider.py": """
from dataclasses import dataclass
try:
    from megatron.core.transformer.transformer_config import TransformerConfig as MCoreTransformerConfig
except ImportError:
    MCoreTransformerConfig = object
@dataclass(kw_only=True)
class GPTModelProvider(MCoreTransformerConfig, Mixin[int]):
    seq_length: int = 0
@dataclass
class LlamaModelProvider(GPTModelProvider):
    hidden_size: int = 4096
    llama_only: int = 0
""",
    "megatron/bridge/training/config.py": """
import megatron.core.optimizer as mcore_optimizer
from megatron.bridge.models import GPTModelProvider
@dataclass
class OptimizerConfig(mcore_optimizer.OptimizerConfig):
    def __init__(self, extra: int = 0, *args, flag: bool = False, **kwargs): ...
@dataclass
class ConfigContainer:
    env_vars: dict[str, str]
    model: Optional[GPTModelProvider] = None
    optimizer: OptimizerConfig
    _seen: bool = False
    def method(self): ...
""",
}


def build_wheels(folder: Path, core: dict[str, str]) -> Path:
    for name, files in [
        ("megatron_core-0.16.1", core),
        ("megatron_core-0.19.2", core),
        ("megatron_bridge-0.3.1", BRIDGE),
        ("megatron_bridge-0.6.2", BRIDGE),
    ]:
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            for path, source in files.items():
                wheel.writestr(path, source)
    return folder


def test_reader_follows_imports_bases_and_subclasses(script: Any, tmp_path: Path) -> None:
    assert script.known_keys([build_wheels(tmp_path, CORE)]) == {
        "": {"env_vars": "23", "model": "23", "optimizer": "23"},
        "env_vars": {"*": "23"},
        "model": {"hidden_size": "0123", "llama_only": "23", "seq_length": "23"},
        "optimizer": {"extra": "23", "flag": "23", "lr": "0123"},
    }


def test_reader_takes_unpacked_wheels(script: Any, tmp_path: Path) -> None:
    wheels = build_wheels(tmp_path, CORE)
    unpacked = []
    for wheel in wheels.glob("*.whl"):
        stem = wheel.name.removesuffix("-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "unpacked" / stem)
        (tmp_path / "unpacked" / stem / f"{stem}.dist-info").mkdir()
        unpacked.append(tmp_path / "unpacked" / stem)
    expected = script.known_keys([wheels])
    assert script.known_keys(unpacked) == expected
    assert script.known_keys([tmp_path / "unpacked"]) == expected


def test_a_base_that_is_gone_is_an_error(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DATA", tmp_path / "known_keys.json")
    without_optimizer = {path: source for path, source in CORE.items() if path != "megatron/core/_config.py"}
    assert script.main([str(build_wheels(tmp_path, without_optimizer))]) == 2
    assert "megatron.bridge.training.config.OptimizerConfig: its base" in capsys.readouterr().err
    assert not (tmp_path / "known_keys.json").exists()


def test_check_names_the_first_differences(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DATA", tmp_path / "known_keys.json")
    wheels = str(build_wheels(tmp_path, CORE))
    assert script.main([wheels, "--check"]) == 1
    assert script.main([wheels]) == 0
    assert script.main([wheels, "--check"]) == 0
    text = script.DATA.read_text("utf-8")
    script.DATA.write_text(text.replace("llama_only", "llama_once"), "utf-8")
    capsys.readouterr()
    assert script.main([wheels, "--check"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "model.llama_once (file: 23, sources: absent); model.llama_only (file: absent, sources: 23)" in captured.err


def test_a_missing_wheel_is_named(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path), "--check"]) == 2
    assert "megatron-core 0.16.1" in capsys.readouterr().err


def test_the_folder_of_the_environment_is_used(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAPKIT_WHEELS", str(tmp_path))
    assert script.main(["--check"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
