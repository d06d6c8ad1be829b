"""Which presets there are, by what they were made for; reads no more of the files than that."""

from __future__ import annotations

from typing import Any

from overlapkit.catalogue import find_gpu, gpu_names
from overlapkit.errors import RecipeError, nearest, shown
from overlapkit.presets.files import preset_header, preset_names


def listed(
    *,
    gpu: str | None = None,
    precision: str | None = None,
    tensor_model_parallel_size: int | None = None,
    hidden_size: int | None = None,
    provenance: str | None = None,
) -> list[dict[str, Any]]:
    """The headers of the presets that fit, the tuned before the derived, each sorted by name; None fits all.

    A GPU for which none was made, such as the H20 of 141 GB, has those of the GPU that it starts from.

    Raises:
        RecipeError: an unknown GPU.
    """
    wanted: dict[str, Any] = {
        "precision": precision,
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "hidden_size": hidden_size,
        "provenance": provenance,
    }
    headers = [preset_header(name) for name in preset_names()]
    if gpu is not None:
        wanted["gpu"] = _made_for(gpu, {header["gpu"] for header in headers})
    found = [
        header for header in headers if all(value is None or header[name] == value for name, value in wanted.items())
    ]
    return sorted(found, key=lambda header: (header["provenance"] == "derived", header["name"]))


def _made_for(spelling: str, gpus: set[str]) -> str:
    gpu = find_gpu(spelling)
    if gpu is None:
        near = nearest(spelling.lower(), gpu_names())
        hint = f"did you mean {near}?" if near else f"known are {', '.join(gpu_names())}"
        raise RecipeError(f"{shown(spelling)} is not a known GPU", source="presets list", hint=hint)
    return gpu.name if gpu.name in gpus else gpu.presets_of
