"""Whether Megatron-Bridge itself makes of a written plan what the plan says, recipe by recipe.

    python scripts/bridge_reads_back.py [--python PYTHON] [RECIPE ...]

Every recipe of recipes/ (or those named), resolved for Bridge 0.3.1 unless it is for Megatron-LM, is written as
overrides and as YAML. Bridge's own code reads each over two configurations, one without comm_overlap and one with
another preset, then sets up precision and overlap. Where the recipe is Bridge's, overlapkit's CommOverlapConfig then
takes the place of Bridge's, as it is and as to_bridge() returns it. Compared are the settings of the plan; a field that
Bridge drops counts as a difference. Prints agree/total and exits with 1 on a difference. It runs in .venv-bridge, made
on first use (torch, some 200 MB), or in PYTHON.

Bridge's model providers and data need Transformer Engine and more to import; they are left out. The model here is
Megatron-Core's TransformerConfig with the providers' own fields.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-bridge"
BRIDGE = {"megatron_bridge": "0.3.1", "megatron_core": "0.16.1", "transformer_engine": "2.12", "torch": "2.10.0"}
NEEDS = ("torch==2.13.0", "numpy", "omegaconf==2.3.*", "hydra-core==1.3.*", "pyyaml", "packaging", "einops")
MEGATRON = (f"megatron-core=={BRIDGE['megatron_core']}", f"megatron-bridge=={BRIDGE['megatron_bridge']}")


# --- in Bridge's environment: this part imports overlapkit for a CommOverlapConfig only -------------


def bridge() -> tuple[Any, Any, Any]:
    """Bridge's modules for overlap, precision and overrides, without the packages' own imports."""
    import importlib
    from types import ModuleType

    import megatron.core

    root = Path(megatron.core.__file__).parent.parent / "bridge"
    for name in ("", "training", "training.utils", "utils", "models"):
        full = f"megatron.bridge.{name}".rstrip(".")
        module = ModuleType(full)
        module.__path__ = [str(root.joinpath(*name.split(".")))] if name != "models" else []
        sys.modules[full] = module
    models: Any = sys.modules["megatron.bridge.models"]
    models.GPTModelProvider = models.T5ModelProvider = type("Provider", (), {})
    overlap: Any = importlib.import_module("megatron.bridge.training.comm_overlap")
    precision = importlib.import_module("megatron.bridge.training.mixed_precision")
    overrides = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
    overlap.HAVE_TE = True
    overlap.is_te_min_version = lambda version, **_: True
    return overlap, precision, overrides


def container(overlap: Any, *, other_preset: bool) -> Any:
    """What a recipe of Bridge holds, as far as an overlap recipe speaks of it."""
    from dataclasses import field, make_dataclass

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    def free(name: str, *fields: str) -> Any:
        return make_dataclass(name, [(each, Any, field(default=None)) for each in fields])()

    provider = ("seq_length", "vocab_size", "make_vocab_size_divisible_by", "should_pad_vocab", "tp_comm_overlap_cfg")
    also = [(each, Any, field(default=None)) for each in (*provider, "share_embeddings_and_output_weights")]
    model = make_dataclass("Model", also, bases=(TransformerConfig,))(
        num_layers=2, hidden_size=64, num_attention_heads=4
    )
    comm_overlap = None
    if other_preset:
        preset = overlap.userbuffers_fp8_h100_h8192_tp2_mbs1_seqlen4096_lora
        comm_overlap = overlap.CommOverlapConfig(tp_comm_overlap=True, tp_comm_overlap_cfg=preset, bucket_size=7)
    values = {
        "model": model,
        "train": free("Train", "micro_batch_size", "global_batch_size", "rampup_batch_size"),
        "optimizer": OptimizerConfig(),
        "ddp": DistributedDataParallelConfig(),
        "dist": free("Dist", "use_megatron_fsdp", "use_torch_fsdp2"),
        "checkpoint": free("Checkpoint", "ckpt_format", "save", "load"),
        "dataset": free("Dataset", "seq_length", "dataset_kwargs"),
        "mixed_precision": "fp16_mixed",
        "comm_overlap": comm_overlap,
        "env_vars": {},
    }
    return make_dataclass("ConfigContainer", [(name, Any) for name in values])(**values)


def set_up(config: Any, num_gpus: int, precision: Any) -> None:
    """The steps of Bridge's runtime_config_update that precede validation."""
    if isinstance(config.mixed_precision, str):
        config.mixed_precision = precision.get_mixed_precision_config(config.mixed_precision)
    config.mixed_precision.finalize()
    config.mixed_precision.setup(config.model, config.optimizer, config.ddp)
    if config.comm_overlap is not None:
        m = config.model
        ranks = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
        config.comm_overlap.data_parallel_size = num_gpus // ranks
        config.comm_overlap.finalize()
        config.comm_overlap.setup(config.model, config.optimizer, config.ddp)


def put_ours(config: Any, job: dict[str, Any], overrides: Any) -> None:
    """overlapkit's CommOverlapConfig, through Bridge's override machinery or as Bridge's own class."""
    sys.path.insert(0, str(ROOT))
    import overlapkit.software
    from overlapkit.comm_overlap import CommOverlapConfig
    from overlapkit.versions import parse_version

    overlapkit.software.installed_transformer_engine = lambda: parse_version(BRIDGE["transformer_engine"])
    ours = CommOverlapConfig.from_recipe(job["recipe"], on_error="warn")
    config.comm_overlap = ours.to_bridge() if job["own"] == "to_bridge" else ours
    overrides.process_config_with_overrides(config, None, ["comm_overlap.data_parallel_size=1"])


def found_settings(config: Any, names: list[str]) -> dict[str, Any]:
    settings = {}
    for path in names:
        section, _, name = path.partition(".")
        settings[path] = getattr(getattr(config, section), name)
    userbuffers = settings["model.tp_comm_overlap_cfg"]
    if not settings["model.tp_comm_overlap"]:
        settings["model.tp_comm_overlap_cfg"] = None
    elif isinstance(userbuffers, dict):
        for options in userbuffers.values():
            if "fp8_buf" in options:
                options["fp8_buf"] = bool(options["fp8_buf"])
    return settings


def read_by_bridge(jobs: list[dict[str, Any]]) -> list[list[str]]:
    """The differences of each job, as sentences."""
    import logging

    overlap, precision, overrides = bridge()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    answers = []
    for job in jobs:
        warnings.clear()
        config = container(overlap, other_preset=job["other_preset"])
        overrides.process_config_with_overrides(config, job.get("file"), job.get("overrides"))
        if "own" in job:
            put_ours(config, job, overrides)
        differences = [text for text in warnings if "not found in config" in text or "Failed to" in text]
        set_up(config, job["num_gpus"], precision)
        settings = found_settings(config, list(job["settings"]))
        for path, value in job["settings"].items():
            if settings[path] != value:
                differences.append(f"{path}: the plan has {value!r}, Bridge {settings[path]!r}")
        answers.append(differences)
    return answers


# --- in overlapkit's environment -----------------------------------------------------------------


def written_jobs(paths: list[Path], folder: Path) -> list[dict[str, Any]]:
    """Every recipe in both forms, over both configurations."""
    from overlapkit.recipe import recipe_from_mapping
    from overlapkit.recipe.yaml_source import parse, read_text
    from overlapkit.render.bridge import to_bridge
    from overlapkit.render.bridge_yaml import to_bridge_yaml
    from overlapkit.resolver import resolve

    jobs = []
    for path in paths:
        mapping = parse(read_text(path), str(path)).value
        if mapping["software"].get("framework") != "megatron-lm":  # such a plan is translated, for any Bridge
            mapping["software"] = BRIDGE
        recipe = recipe_from_mapping(mapping, source=str(path))
        plan = resolve(recipe)
        file = folder / f"{path.stem}.yaml"
        file.write_text(to_bridge_yaml(recipe, plan)[0], encoding="utf-8")
        common = {"num_gpus": plan.parallelism.world_size, "settings": plan.to_dict()["settings"]}
        for other_preset in (False, True):
            form = {"other_preset": other_preset, **common}
            jobs.append({"name": f"{path.stem}, bridge", "overrides": shlex.split(to_bridge(recipe, plan)[0]), **form})
            jobs.append({"name": f"{path.stem}, bridge-yaml", "file": str(file), **form})
        if plan.target.framework == "megatron-bridge" and recipe.comm_overlap is not None:
            for own in ("CommOverlapConfig", "to_bridge"):
                from_recipe = {"own": own, "recipe": mapping, "file": str(file), "other_preset": False, **common}
                jobs.append({"name": f"{path.stem}, {own}", **from_recipe})
    return jobs


def bridge_python() -> str:
    """An environment with Bridge, a CPU build of torch and what they import, made on first use."""
    python = VENV / "bin" / "python"
    done = VENV / "complete"
    if not done.exists():
        print(f"making {VENV.name} with torch and Megatron-Bridge", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        install = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*install, *NEEDS], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*install, "--no-deps", *MEGATRON], check=True, stdout=subprocess.DEVNULL)
        done.touch()
    return str(python)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE")
    parser.add_argument("--python", help="an interpreter that has Megatron-Bridge and what it needs")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        print(json.dumps(read_by_bridge(json.loads(Path(options.jobs).read_text(encoding="utf-8")))))
        return 0
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        jobs = written_jobs(options.recipes or sorted((ROOT / "recipes").glob("*.yaml")), Path(folder))
        file = Path(folder) / "jobs.json"
        file.write_text(json.dumps(jobs), encoding="utf-8")
        python = options.python or bridge_python()
        run = subprocess.run(
            [python, "-W", "ignore", __file__, "--jobs", str(file)], stdout=subprocess.PIPE, check=True
        )
    answers = json.loads(run.stdout.splitlines()[-1])
    for job, differences in zip(jobs, answers, strict=True):
        for difference in differences:
            print(f"{job['name']}: {difference}")
    agree = sum(not differences for differences in answers)
    print(f"{agree}/{len(answers)} agree")
    return 0 if agree == len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
