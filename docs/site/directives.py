"""What the API reference needs beside Sphinx's autodoc: a configuration's fields, and the settings of a section."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from raggedmoe.cli.train import help_sections

EMPTY = "\\ "  # text that reStructuredText leaves out


def field_lines(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and comment of each field of a dataclass; the comment is behind the field or above."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign):
            default = "" if node.value is None else ast.unparse(node.value)
            default = (
                default.removeprefix("field(default_factory=").removesuffix(")") if "factory" in default else default
            )
            yield ast.unparse(node.target), ast.unparse(node.annotation), default, _comment(lines, node)


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    behind = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset :].strip()
    if behind.startswith("#"):
        return behind.lstrip("# ")
    above = []
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().lstrip("# "))
    return " ".join(above)


class _Definitions(Directive):
    required_arguments = 1

    def entries(self) -> Iterator[tuple[str, str]]:
        """Yield terms and what they mean."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        lines = [line for term, text in self.entries() for line in (term, "   " + (text or EMPTY), "")]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, node)
        return node.children


class Fields(_Definitions):
    """The fields of a dataclass, with their comments: ``.. fields:: raggedmoe.MoEConfig``."""

    def entries(self) -> Iterator[tuple[str, str]]:
        module, _, name = self.arguments[0].rpartition(".")
        for field, kind, default, comment in field_lines(getattr(importlib.import_module(module), name)):
            shown = f", by default ``{default}``" if default else ""
            yield f"**{field}** : ``{kind}``{shown}", comment


class Settings(_Definitions):
    """The settings of a section of `TrainConfig`, as `raggedmoe train --help` lists them: ``.. settings:: data``."""

    def entries(self) -> Iterator[tuple[str, str]]:
        for setting in help_sections()[self.arguments[0]]:
            kind = " | ".join(setting.choices) if setting.choices else setting.type.name
            named = "" if setting.name == setting.field else f"; on the command line ``{setting.name}``"
            yield f"**{setting.field}** : {kind}, by default ``{setting.default!r}``{named}", setting.help


def setup(app: Any) -> dict[str, bool]:
    """Add the directives to Sphinx."""
    app.add_directive("fields", Fields)
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
