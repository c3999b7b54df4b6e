"""Reading JSON files that other programs wrote."""

import json
from typing import Any

from raggedmoe.storage import AnyPath


def read_json(path: AnyPath) -> Any:
    """Read a JSON file. If it is no JSON, no text or nested too deeply, the error names the file."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None


def read_json_object(path: AnyPath) -> dict[str, Any]:
    """Read a file as `read_json` does, and require that it holds an object."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
