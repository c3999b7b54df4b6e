"""What a function's docstring begins with: a verb that says what the function does."""

import ast
import re
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src" / "raggedmoe"
# No sentence that tells a function what to do begins with an article, pronoun, question word or preposition, or with
# what is no word, as a formula.
NO_VERB = re.compile(
    r"[^A-Za-z]|(The|A|An|All|Any|Both|Each|Every|Many|More|Most|No|None|Nothing|One|Only|Some|Such|Two|This|That|These"
    r"|Those|It|Its|They|Their|We|Our|What|When|Where|Whether|Which|While|Who|Whose|Why|How|As|At|By|For|From|If|In"
    r"|Like|Of|On|To|Under|With|Without|Here|There)\b"
)


def docstrings_without_verb(text):
    """List them for functions and methods, but for properties, which are values and may be named by nouns."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    functions = [node for node in functions if not any("property" in ast.unparse(d) for d in node.decorator_list)]
    docstrings = [ast.get_docstring(node) for node in functions]
    return [docstring for docstring in docstrings if docstring and NO_VERB.match(docstring)]


def test_the_docstring_of_a_function_begins_with_a_verb():
    unclear = []
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        unclear += [f"{name}: {docstring}" for docstring in docstrings_without_verb(path.read_text())]
    assert not unclear, "begin these with a verb: " + "\n".join(unclear)


def test_a_docstring_without_a_verb_is_seen():
    text = '''
def rows():
    """The rows that are kept."""

def product(a, b):
    """``a · b``."""

def keep():
    """Keep the rows."""

def undescribed():
    return None

@property
def size():
    """The number of rows."""
'''
    assert docstrings_without_verb(text) == ["The rows that are kept.", "``a · b``."]
