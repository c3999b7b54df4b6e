"""Reading JSON that others wrote."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """A file's value. What is no JSON, no text or nested without end is the file's fault, and named as such."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json`, for a file that must hold an object."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
