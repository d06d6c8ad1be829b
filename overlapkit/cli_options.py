"""Options that several verbs have."""

from __future__ import annotations

from enum import Enum


class DataFormat(str, Enum):
    text = "text"
    json = "json"
    yaml = "yaml"


class FailOn(str, Enum):
    error = "error"
    warning = "warning"
    info = "info"
    never = "never"
