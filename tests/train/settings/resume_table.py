"""The table of docs/train.md of what a resumed run may change, made from the fields.

`python -m tests.train.settings.resume_table --write docs/train.md` puts it there.
"""

import sys
from pathlib import Path

from raggedmoe.train.settings.config import SETTINGS

BEGIN = "<!-- made by `python -m tests.train.settings.resume_table --write docs/train.md` -->"
END = "<!-- end of the table -->"


def table() -> str:
    """The lines between the marks."""
    sections: dict[str, tuple[list[str], list[str]]] = {}
    for setting in SETTINGS.values():
        may, may_not = sections.setdefault(setting.section, ([], []))
        (may if setting.may_change else may_not).append(f"`{setting.name}`")
    lines = [BEGIN, "| section | may change | may not change |", "|---|---|---|"]
    for section, (may, may_not) in sections.items():
        name = f"`{section}`" if section else "(the model)"
        lines.append(f"| {name} | {_listed(may, may_not)} | {_listed(may_not, may)} |")
    return "\n".join([*lines, END])


def _listed(names: list[str], others: list[str]) -> str:
    if not names:
        return "–"
    return "all" if not others and len(names) > 1 else ", ".join(names)


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"expected {BEGIN} and {END} in the page"
    return f"{before}{table()}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--write":
        sys.exit("expected --write FILE")
    path = Path(sys.argv[2])
    path.write_text(with_table(path.read_text()))
