"""A tiny problem on disk, and contenders that run in this process instead of one each."""

import pytest

from raggedmoe.bench.case import FORWARD, SHAPES, shape_case
from raggedmoe.bench.child import PreparedCalls
from raggedmoe.bench.children import ChildError
from raggedmoe.bench.problem import write_problem
from tests.bench.trial_contenders import tiny


@pytest.fixture(scope="session")
def problem(tmp_path_factory):
    """Makes a case of a subject on a tiny problem: of 24 tokens, or of 2 for a shape that decodes."""
    written = {}

    def make(subject="grouped_matmul", direction=FORWARD, dtype="float32", shape="mixtral", **sizes):
        drawn = tiny(SHAPES[shape], **({"tokens": 2} if SHAPES[shape].decodes else {"tokens": 72}) | sizes)
        if (drawn, dtype) not in written:
            folder = tmp_path_factory.mktemp("problem")
            written[drawn, dtype] = folder, write_problem(folder, drawn, dtype, for_torch=True)
        folder, routing = written[drawn, dtype]
        return shape_case(subject, drawn, dtype, direction, folder, int((routing.group_sizes > 0).sum()))

    return make


class ChildrenHere:
    """Answers what the processes would, in this one, and keeps what was asked."""

    def __init__(self):
        self.children, self.asked = {}, []

    def ask(self, name, environment, question):
        question = dict(question)
        do = question.pop("do")
        self.asked.append((do, question["key"]))
        try:
            return getattr(self.children.setdefault(name, PreparedCalls()), do)(**question)
        except Exception as error:
            raise ChildError(f"{type(error).__name__}: {error}") from None

    def drop(self):
        self.children.clear()


@pytest.fixture
def children_here(monkeypatch):
    monkeypatch.setattr("raggedmoe.bench.child.SHORT_TURN", 0)
    monkeypatch.setattr("raggedmoe.bench.run.SETTLE", 0)
    return ChildrenHere()
