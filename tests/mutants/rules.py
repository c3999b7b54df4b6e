"""Bugs by rule: each rule changes one kind of expression into what a tired programmer might have written.

A rule is given an expression and the nodes around it, innermost last, and returns what stands in its place, or None
where it does not apply. Whatever cannot change a result is left alone: annotations, texts, errors, assertions, logging.
So are module-level tables and defaults, and the arguments of calls that kill or delete.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Around = tuple[ast.AST, ...]
ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.ListComp)

TEXTS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
TEXT_CALLS = {"print", "warn", "warning", "info", "debug", "error", "exception", "log", "note", "isinstance", "cast"}
TEXT_FUNCTIONS = {"note", "__repr__", "__str__", "__format__"}
DANGEROUS_CALLS = {"kill", "killpg", "send_signal", "rmtree", "unlink", "rmdir", "removedirs"}
SYMMETRIC_CALLS = {
    "min",
    "max",
    "minimum",
    "maximum",
    "logical_and",
    "logical_or",
    "add",
    "multiply",
    "gcd",
    "allclose",
}
BACKWARD = ("backward", "gradient", "transpose", "vjp", "bwd")


@dataclass(frozen=True)
class Mutant:
    """One bug in one place: the bytes from ``start`` to ``end`` of a file give way to ``replacement``."""

    file: str  # below the package
    function: str
    rule: str
    line: int
    start: int
    end: int
    replacement: str

    @property
    def expression(self) -> str:
        """The place, whatever the rule that changes it."""
        return f"{self.file}:{self.start}:{self.end}"

    def apply(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.replacement.encode() + text[self.end :]).decode()

    def before(self, source: str) -> str:
        return source.encode()[self.start : self.end].decode()

    def source_line(self, source: str) -> str:
        return source.splitlines()[self.line - 1].strip()


def called(node: ast.AST) -> str:
    """The last part of a call's name: `where` of `jnp.where(...)`."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_integer(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def negated(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), node)


def off_by_one(node: ast.expr, around: Around) -> ast.expr | None:
    """An integer in index arithmetic: in an index, beside + or -, in a range."""
    if not is_integer(node):
        return None
    outer = next(each for each in around[::-1] if not isinstance(each, ast.UnaryOp | ast.Slice | ast.Tuple))
    summed = isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Add | ast.Sub)
    if summed or isinstance(outer, ast.Subscript) or called(outer) in ("range", "arange"):
        return ast.Constant(node.value + 1)
    return None


def wrong_axis(node: ast.expr, around: Around) -> ast.expr | None:
    """`axis=0` for `axis=1`, `axis=-2` for `axis=-1`."""
    keyword = next((each for each in around[::-1] if not isinstance(each, ast.UnaryOp | ast.Tuple)), None)
    if not is_integer(node) or not isinstance(keyword, ast.keyword) or not keyword.arg:
        return None
    if not keyword.arg.endswith(("axis", "axes", "dim", "dims", "dimension", "dimensions")):
        return None
    return ast.Constant(0 if node.value == 1 and around[-1] is keyword else node.value + 1)


def is_masked(node: ast.AST) -> bool:
    """A `where` of three, or `lax.select`."""
    of_lax = called(node) == "select" and ast.unparse(node.func).endswith("lax.select")
    return (called(node) == "where" or of_lax) and len(node.args) == 3


def dropped_mask(node: ast.expr, around: Around) -> ast.expr | None:
    """`a` for `where(mask, a, b)`, `first` for `first & second`."""
    if is_masked(node):
        return node.args[1]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return node.left
    return None


def inverted_mask(node: ast.expr, around: Around) -> ast.expr | None:
    """`where(mask, b, a)` for `where(mask, a, b)`."""
    if is_masked(node):
        mask, a, b = node.args
        return ast.Call(node.func, [mask, b, a], node.keywords)
    return None


def sign(node: ast.expr, around: Around) -> ast.expr | None:
    """`a + b` for `a - b` and the other way round, `a` for `-a`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return None if isinstance(node.operand, ast.Constant) else node.operand
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub) or is_of_sequences(node):
        return None
    return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)


def is_of_sequences(node: ast.BinOp) -> bool:
    return any(is_text(each) or isinstance(each, ast.List | ast.Tuple) for each in (node.left, node.right))


def missing_term(node: ast.expr, around: Around) -> ast.expr | None:
    """`a` for `a + b`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not is_text(node.left):
        return None if is_text(node.right) else node.left  # a list that is not added is a fault like any other
    return None


def missing_gradient(node: ast.expr, around: Around) -> ast.expr | None:
    """Zeros for what a backward pass returns."""
    function = next((each for each in around[::-1] if isinstance(each, ast.FunctionDef)), None)
    outer = next((each for each in around[::-1] if not isinstance(each, ast.Tuple)), None)
    if function is None or not isinstance(outer, ast.Return) or isinstance(node, ast.Constant | ast.Tuple | ast.Lambda):
        return None
    if not any(word in function.name for word in BACKWARD):
        return None
    return ast.BinOp(ast.Constant(0), ast.Mult(), node)


def is_path(node: ast.BinOp) -> bool:
    """Whether `/` joins a path, as far as names tell: one of them is a folder's, or on the right is a text's."""
    words = {getattr(each, "id", getattr(each, "attr", "")).lower() for each in ast.walk(node)}
    on_disk = any(part in word for word in words for part in ("folder", "path", "root", "parent", "home", "tmp"))
    return on_disk or is_text(node.right) or (isinstance(node.right, ast.Name) and node.right.id.isupper())


def wrong_normaliser(node: ast.expr, around: Around) -> ast.expr | None:
    """`a` for `a / b` where that is no path, `sum` for `mean`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return None if is_path(node) else node.left
    if called(node) == "mean" and isinstance(node.func, ast.Attribute):
        return ast.Call(ast.Attribute(node.func.value, "sum"), node.args, node.keywords)
    return None


def wrong_factor(node: ast.expr, around: Around) -> ast.expr | None:
    """`a` for `a * b`."""
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and not isinstance(node.left, ast.List | ast.Tuple)
    ):
        return None if is_text(node.left) or is_text(node.right) else node.left
    return None


def rounding(node: ast.expr, around: Around) -> ast.expr | None:
    """Up instead of down: `-(-a // b)` for `a // b`; and the other way round, as a part of `-(-a // b)`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        up = ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right)
        return ast.UnaryOp(ast.USub(), up)
    return None


def boundary(node: ast.expr, around: Around) -> ast.expr | None:
    """`<` for `<=`, and the like."""
    other = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in other:
        return ast.Compare(node.left, [other[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    return None


def inverted_condition(node: ast.expr, around: Around) -> ast.expr | None:
    """`not a` for `a` as a condition, `a` for `not a`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    outer = around[-1]
    is_condition = isinstance(outer, ast.If | ast.IfExp) and outer.test is node
    if is_condition or (isinstance(outer, ast.comprehension) and node in outer.ifs):
        return negated(node)
    return None


def and_for_or(node: ast.expr, around: Around) -> ast.expr | None:
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    return None


def min_for_max(node: ast.expr, around: Around) -> ast.expr | None:
    pairs = [("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("pmin", "pmax")]
    other = {**dict(pairs), **{b: a for a, b in pairs}}
    if called(node) not in other or not (node.args or isinstance(node.func, ast.Attribute)):
        return None
    name = other[called(node)]
    function = ast.Attribute(node.func.value, name) if isinstance(node.func, ast.Attribute) else ast.Name(name)
    return ast.Call(function, node.args, node.keywords)


def swapped_arguments(node: ast.expr, around: Around) -> ast.expr | None:
    """`f(b, a)` for `f(a, b)`."""
    if not isinstance(node, ast.Call) or called(node) in SYMMETRIC_CALLS or len(node.args) < 2:
        return None
    first, second, *rest = node.args
    if not all(isinstance(each, ast.Name | ast.Subscript) for each in (first, second)):
        return None  # an attribute is often a type, which any call would refuse
    return ast.Call(node.func, [second, first, *rest], node.keywords)


def swapped_ranks(node: ast.expr, around: Around) -> ast.expr | None:
    """`(destination, source)` for `(source, destination)` in a permutation; the last rank for the first, and so on."""
    if called(node) == "axis_index":
        ranks = ast.Call(ast.Attribute(node.func.value, "psum"), [ast.Constant(1), *node.args], [])
        return ast.BinOp(ast.BinOp(ranks, ast.Sub(), ast.Constant(1)), ast.Sub(), node)
    if isinstance(node, ast.ListComp) and isinstance(node.elt, ast.Tuple) and len(node.elt.elts) == 2:
        return ast.ListComp(ast.Tuple(node.elt.elts[::-1]), node.generators)
    return None


def skipped_call(node: ast.expr, around: Around) -> ast.expr | None:
    """Nothing for a call whose result nobody reads: an fsync, an append, a check."""
    if isinstance(node, ast.Call) and isinstance(around[-1], ast.Expr):
        return ast.Constant(None)
    return None


def wrong_constant(node: ast.expr, around: Around) -> ast.expr | None:
    """Twice a float, one for zero."""
    if isinstance(node, ast.Constant) and type(node.value) is float:
        return ast.Constant(node.value * 2 or 1.0)
    return None


def wrong_flag(node: ast.expr, around: Around) -> ast.expr | None:
    """`flag=False` for `flag=True`."""
    if isinstance(node, ast.Constant) and type(node.value) is bool and isinstance(around[-1], ast.keyword):
        return ast.Constant(not node.value)
    return None


RULES = {
    "off by one": off_by_one,
    "wrong axis": wrong_axis,
    "mask dropped": dropped_mask,
    "mask inverted": inverted_mask,
    "sign": sign,
    "term missing": missing_term,
    "gradient missing": missing_gradient,
    "normaliser missing": wrong_normaliser,
    "factor missing": wrong_factor,
    "rounding": rounding,
    "boundary": boundary,
    "condition inverted": inverted_condition,
    "and for or": and_for_or,
    "min for max": min_for_max,
    "arguments swapped": swapped_arguments,
    "ranks swapped": swapped_ranks,
    "call skipped": skipped_call,
    "wrong constant": wrong_constant,
    "wrong flag": wrong_flag,
}


def expressions(node: ast.AST, around: Around = ()) -> Iterator[tuple[ast.expr, Around]]:
    """The expressions of functions' bodies that a rule may change, with the nodes around each."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_alone(child, node):
                continue
            inside = any(isinstance(each, ast.FunctionDef) for each in (*around, node))
            if inside and isinstance(child, ast.expr) and not isinstance(child, ast.Starred):
                yield child, (*around, node)
            yield from expressions(child, (*around, node))


def _is_left_alone(node: ast.AST, outer: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in TEXT_FUNCTIONS
    if isinstance(outer, ast.Call) and called(outer) in DANGEROUS_CALLS:
        return True
    return isinstance(node, TEXTS) or called(node) in TEXT_CALLS


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant that the rules make of a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, around in expressions(ast.parse(source)):
        functions = [each.name for each in around if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        for rule, change in RULES.items():
            changed = change(node, around)
            if changed is None:
                continue
            text = ast.unparse(ast.fix_missing_locations(changed))
            found.append(
                Mutant(
                    file=file,
                    function=".".join(functions),
                    rule=rule,
                    line=node.lineno,
                    start=starts[node.lineno - 1] + node.col_offset,
                    end=starts[node.end_lineno - 1] + node.end_col_offset,
                    replacement=text if isinstance(changed, ATOMS) else f"({text})",
                )
            )
    return found
