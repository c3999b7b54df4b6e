"""What `raggedmoe bench` measures with peers: the cases of each subject, on arrays drawn for them."""

import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from raggedmoe.bench.case import DIRECTIONS, SHAPES, SWEEP, Case, Shape, shape_case
from raggedmoe.bench.problem import write_problem
from raggedmoe.bench.run import Result, Session

SHAPED = ("grouped_matmul", "layer", "sweep")
SWEPT = (("grouped_matmul", "forward"), ("layer", "forward"))


def shaped_cases(subject: str) -> Iterator[tuple[Shape, list[tuple[str, str]]]]:
    """List the shapes of a subject, and which subjects and directions are measured of each."""
    if subject == "sweep":
        yield from ((shape, list(SWEPT)) for shape in SWEEP)
        return
    for shape in SHAPES.values():
        directions = DIRECTIONS[subject][:1] if shape.decodes else DIRECTIONS[subject]
        yield shape, [(subject, direction) for direction in directions]


def measure_shapes(subjects: Iterable[str], session: Session) -> Iterator[list[Result]]:
    """Measure every case that the session wants; those of a shape share its arrays."""
    wanted = dict[Shape, list[tuple[str, str]]]()
    for subject in subjects:
        for shape, cases in shaped_cases(subject):
            wanted.setdefault(shape, []).extend(cases)
    for shape, cases in wanted.items():
        for dtype in session.dtypes:
            named = [(subject, way) for subject, way in cases if session.wants(f"{subject} {shape.name} {way}", dtype)]
            if not named:
                continue
            with tempfile.TemporaryDirectory(prefix="raggedmoe-bench-") as folder:
                session.say(f"drawing {shape.name}, {dtype}")
                routing = write_problem(Path(folder), shape, dtype, for_torch=find_spec("torch") is not None)
                active = int((routing.group_sizes > 0).sum())
                for subject, way in named:
                    yield session.measure(shape_case(subject, shape, dtype, way, Path(folder), active))


def case_names(subject: str) -> list[str]:
    """List the names of a subject's cases."""
    return [
        Case(subject=s, shape=shape, dtype="", direction=way, folder="").name
        for shape, cases in shaped_cases(subject)
        for s, way in cases
    ]
