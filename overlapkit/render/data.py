"""JSON and YAML: the plan as its contract has it."""

from __future__ import annotations

import json
from typing import IO, Any


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def to_yaml(value: Any) -> str:
    import yaml

    form: dict[str, Any] = {"sort_keys": False, "allow_unicode": False, "width": 120}
    try:
        text: str = yaml.dump(value, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), **form)
    except UnicodeEncodeError:  # half of a surrogate pair, as in a file name that is not UTF-8: libyaml cannot
        text = yaml.dump(value, Dumper=yaml.SafeDumper, **form)
    return text


def write_data(value: Any, form: str, stream: IO[str]) -> None:
    """``value`` as ``json`` or ``yaml``."""
    stream.write(to_json(value) if form == "json" else to_yaml(value))
