"""The error for a name that is not in a table."""

import difflib
from collections.abc import Iterable


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """An error that lists the known names and suggests the nearest."""
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}{hint}")
