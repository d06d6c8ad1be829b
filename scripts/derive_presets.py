"""Write the derived presets that overlapkit ships: for GPUs and shapes that nobody published a tuned one for.

    python scripts/derive_presets.py            # write presets/userbuffers/*.yaml
    python scripts/derive_presets.py --check    # write nothing; exit 1 when a committed file differs, lacks or is extra

All times grow with the tokens alike, so a derivation for 8192 tokens is that for any number: one sequence length is
written per shape. A shape is one model of its hidden size (overlapkit/data/preset_models.yaml). Where a tuned preset of
the GPU itself has the name, it stays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from overlapkit.catalogue import Gpu, find_gpu
from overlapkit.presets.derived_file import beside_tuned, preset_name, preset_text
from overlapkit.presets.times import Inputs, Precision, inputs_of_hidden_size

FOLDER = Path(__file__).resolve().parent.parent / "presets" / "userbuffers"
SEQ_LENGTH = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """Shapes for one GPU: every hidden size with every TP."""

    gpu: str
    hidden_sizes: tuple[int, ...]
    tensor_model_parallel_sizes: tuple[int, ...] = (4, 8)


# h20 serves the 141 GB variant too (preset_family), whose SMs, FLOP/s and NVLink are the same.
SHIPPED = (
    Shipped(gpu="h20", hidden_sizes=(4096, 5120, 8192)),
    Shipped(gpu="h800", hidden_sizes=(4096, 5120, 8192)),
    Shipped(gpu="a800", hidden_sizes=(4096, 5120), tensor_model_parallel_sizes=(2, 4, 8)),
    Shipped(gpu="a800", hidden_sizes=(8192,)),
    Shipped(gpu="h200", hidden_sizes=(8192, 16384)),
    Shipped(gpu="gb200", hidden_sizes=(8192, 16384, 18432)),
    Shipped(gpu="b300", hidden_sizes=(8192, 16384, 18432)),
    Shipped(gpu="gb300", hidden_sizes=(8192, 16384, 18432)),
)


def shipped_inputs() -> Iterator[Inputs]:
    for shapes in SHIPPED:
        gpu = _gpu(shapes.gpu)
        precisions: tuple[Precision, ...] = ("bf16",) if gpu.fp8_tflops is None else ("bf16", "fp8")
        for hidden_size in shapes.hidden_sizes:
            for tp in shapes.tensor_model_parallel_sizes:
                for precision in precisions:
                    yield inputs_of_hidden_size(
                        gpu,
                        precision,
                        hidden_size=hidden_size,
                        tensor_model_parallel_size=tp,
                        seq_length=SEQ_LENGTH,
                    )


def shipped_files() -> dict[str, str]:
    """File name -> text."""
    return {
        f"{preset_name(inputs)}.yaml": preset_text(inputs, beside=beside_tuned(inputs)) for inputs in shipped_inputs()
    }


def _gpu(name: str) -> Gpu:
    gpu = find_gpu(name)
    if gpu is None:
        raise SystemExit(f"{name} is not in overlapkit/data/gpus.yaml")
    return gpu


def committed_derived() -> set[str]:
    """The files whose provenance is derived."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = sorted(FOLDER.glob("*.yaml"))
    return {
        file.name
        for file in files
        if yaml.load(file.read_text(encoding="utf-8"), Loader=loader).get("provenance") == "derived"
    }


def differences(files: dict[str, str]) -> list[str]:
    """One line for each file that is not as it would be written."""
    found = [f"{name}: no longer shipped, delete it" for name in sorted(committed_derived() - files.keys())]
    for name, text in files.items():
        path = FOLDER / name
        if not path.is_file():
            found.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{name}: differs")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, report what would change")
    options = parser.parse_args()
    files = shipped_files()
    if options.check:
        found = differences(files)
        print("\n".join(found) if found else f"{len(files)} derived presets are as they would be written")
        return 1 if found else 0
    for name, text in files.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(files)} presets to {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
