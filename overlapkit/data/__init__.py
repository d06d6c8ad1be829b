"""Tables that ship with the package, read on first use."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any


@lru_cache(maxsize=16)
def load_json(name: str) -> Any:
    return json.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))


@lru_cache(maxsize=16)
def load_yaml(name: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(files(__name__).joinpath(name).read_text(encoding="utf-8"), Loader=loader)
