"""The limits: dense float32 matmuls of the same useful FLOPs, or reading the active weights once, by every library.

Each library's matmuls come twice: with one matrix, which is the limit, and with E different matrices and R/E rows for
each, which is what no grouping could avoid. The limit of a case is that of the fastest library.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from raggedmoe.bench.case import SWEEP, Case
from raggedmoe.bench.contender import LIMIT, NOTE, SECOND_LIMIT, Prepared, contender
from raggedmoe.bench.machine import cpu_features, num_cores
from raggedmoe.bench.problem import read_array, routing_of, touch

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "BLIS_NUM_THREADS": "1"}
SUBJECTS = ("layer", "grouped_matmul")
TILE_ROWS = 256  # of a matmul that is shared over threads, each calling a library of one thread
WHOLE_MODEL_SIDE = 1024  # of the squares that stand for the matmuls of a training step
READING = "reading the weights"
PIECE = 2**20  # elements that one call reads
Operands = tuple[np.ndarray, np.ndarray]


def reads_why_not(case: Case) -> str | None:
    """Leave matmuls out for few tokens: they are the limit of many."""
    return "few tokens: reading the weights is the limit" if case.reads else None


def multiplies_why_not(case: Case) -> str | None:
    """Leave reading out for many tokens: it is the limit of few."""
    return None if case.reads else "many tokens: matmuls are the limit"


def not_swept_why_not(case: Case) -> str | None:
    """Leave reading out but in a sweep: where the number of experts grows, so does what is read of them."""
    return None if case.shape in SWEEP else "not a sweep over the number of experts"


def bfloat16_why_not(case: Case) -> str | None:
    """Leave bfloat16 out but where it has instructions of its own, and so is a limit of its own."""
    if case.dtype != "bfloat16" or not {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_features()):
        return "only for bfloat16 on a CPU with instructions for it"
    return reads_why_not(case)


def dense_operands(case: Case, groups: int) -> Iterator[tuple[str, list[Operands]]]:
    """Yield for every product of the case its left and right operands, the rows cut evenly over so many groups.

    One group has one matrix, which is the first expert's.
    """
    if case.shape is None:
        side = np.full((WHOLE_MODEL_SIDE, WHOLE_MODEL_SIDE), 0.5, np.float32)
        yield from [("nn", [(side, side)])] * max(round(case.flops / (2 * side.size * side.shape[0])), 1)
        return
    shape, rng = case.sizes, np.random.default_rng(0)
    rows = {width: rng.standard_normal((shape.rows, width), dtype=np.float32) for width in _widths(case)}
    stored = read_array(case.place, "wi_0", case.dtype)[:groups]
    weights = stored if stored.dtype == np.float32 else stored.astype(np.float32)
    touch(weights)
    bounds = [shape.rows * group // groups for group in range(groups + 1)]
    parts = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    wide, narrow = rows[shape.model_dim], rows[shape.expert_dim]
    for product in case.products:
        if product == "tn":
            yield product, [(narrow[part], wide[part]) for part in parts]
        else:
            left = wide if product == "nt" else narrow
            yield product, [(left[part], weights[group]) for group, part in enumerate(parts)]


def _widths(case: Case) -> set[int]:
    return {case.sizes.model_dim, case.sizes.expert_dim}


def orient(product: str, left: Any, right: Any) -> tuple[Any, Any]:
    """Transpose the operands, without a copy, so that ``left @ right`` is the product."""
    return (left.T if product[0] == "t" else left), (right.T if product[1] == "t" else right)


def prepare_matmuls(case: Case, groups: int, multiply: Callable[[str, Any, Any], Any], place: Any) -> Prepared:
    """Prepare all products, each by ``multiply`` on operands that ``place`` has put where the library wants them."""
    products: list[tuple[str, list[tuple[Any, Any]]]] = []
    placed: dict[int, Any] = {}  # an operand that stands in several products is placed once
    for product, operands in dense_operands(case, groups):
        pairs = [tuple(placed.setdefault(_identity(operand), place(operand)) for operand in pair) for pair in operands]
        products.append((product, [(pair[0], pair[1]) for pair in pairs]))

    def run() -> Any:
        # Every product's results stay until all are there, but not longer than the next product's need room.
        for product, pairs in products:
            results = [multiply(product, left, right) for left, right in pairs]
            _wait(results)
        return None

    return Prepared(run=run)


def _identity(array: np.ndarray) -> int:
    return hash((array.ctypes.data, array.shape))


def _wait(results: list[Any]) -> None:
    for result in results:
        getattr(result, "block_until_ready", lambda: None)()


def xla_matmuls(case: Case, groups: int, dtype: str = "float32") -> Prepared:
    """Prepare the products by XLA's dot."""
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, static_argnums=0)
    def dot(product: str, left: Any, right: Any) -> Any:
        return jnp.matmul(*orient(product, left, right), preferred_element_type=jnp.float32).astype(left.dtype)

    return prepare_matmuls(case, groups, dot, lambda array: jnp.asarray(array, dtype))


def torch_matmuls(case: Case, groups: int, dtype: str = "float32") -> Prepared:
    """Prepare the products by PyTorch's mm."""
    import torch

    def mm(product: str, left: Any, right: Any) -> Any:
        with torch.inference_mode():
            return torch.mm(*orient(product, left, right))

    return prepare_matmuls(case, groups, mm, lambda array: torch.from_numpy(array).to(getattr(torch, dtype)))


def numpy_matmuls(case: Case, groups: int) -> Prepared:
    """Prepare the products by NumPy's BLAS with threads of its own."""
    return prepare_matmuls(case, groups, lambda *product: np.matmul(*orient(*product)), lambda array: array)


def shared_matmuls(case: Case, groups: int) -> Prepared:
    """Prepare the products by NumPy's BLAS with one thread, called from one of each core, which takes the next tile."""
    pool = ThreadPoolExecutor(num_cores())
    products = list(dense_operands(case, groups))

    def tiles() -> Iterator[tuple[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]]:
        for product, operands in products:
            parts = []
            for left, right in (orient(product, *pair) for pair in operands):
                out = np.empty((left.shape[0], right.shape[1]), np.float32)
                for start in range(0, left.shape[0], TILE_ROWS):
                    parts.append((left[start : start + TILE_ROWS], right, out[start : start + TILE_ROWS]))
            yield product, parts

    def multiply(tile: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        np.matmul(tile[0], tile[1], out=tile[2])

    def run() -> None:
        for _, parts in tiles():
            list(pool.map(multiply, parts))

    return Prepared(run=run)


def _register_matmuls() -> None:
    """Make each library a contender twice, under its own name."""
    libraries: tuple[tuple[str, Callable[..., Prepared], dict[str, Any]], ...] = (
        ("XLA", xla_matmuls, {}),
        ("NumPy", numpy_matmuls, {}),
        ("NumPy, our threads", shared_matmuls, {"environment": ONE_THREAD}),
        ("PyTorch", torch_matmuls, {"needs": ("torch",)}),
    )
    for library, matmuls, rest in libraries:
        for_limit = functools.partial(matmuls, groups=1)
        _contender(f"dense: {library}", for_limit, LIMIT, library, reads_why_not, (*SUBJECTS, "train"), rest)
        _contender(f"E matrices: {library}", _by_experts(matmuls), SECOND_LIMIT, library, reads_why_not, SUBJECTS, rest)
        if matmuls in (xla_matmuls, torch_matmuls):
            narrow = functools.partial(matmuls, groups=1, dtype="bfloat16")
            _contender(f"dense bf16: {library}", narrow, LIMIT, library, bfloat16_why_not, SUBJECTS, rest)
    readers: tuple[tuple[str, Callable[[Case], Prepared], dict[str, Any]], ...] = (
        ("XLA", xla_read, {}),
        ("NumPy, our threads", numpy_read, {"environment": ONE_THREAD}),
        ("PyTorch", torch_read, {"needs": ("torch",)}),
    )
    for library, read, rest in readers:
        _contender(f"read: {library}", read, LIMIT, library, multiplies_why_not, (*SUBJECTS, "generate"), rest)
        _contender(f"{READING}: {library}", read, NOTE, library, not_swept_why_not, SUBJECTS, rest)


def _by_experts(matmuls: Callable[..., Prepared]) -> Callable[[Case], Prepared]:
    return lambda case: matmuls(case, groups=case.sizes.num_experts)


def _contender(
    name: str,
    prepare: Callable[[Case], Prepared],
    role: str,
    library: str,
    why_not: Callable[[Case], str | None],
    subjects: Iterable[str],
    rest: dict[str, Any],
) -> None:
    def prepare_here(case: Case) -> Prepared:
        return prepare(case)

    contender(name, *subjects, role=role, process=f"limit: {library}", why_not=why_not, **rest)(prepare_here)


def read_operands(case: Case) -> list[np.ndarray]:
    """Map the active experts' weights as float32 words; a whole model's weights are one fresh array of their size.

    Its numbers differ, as the host of a virtual machine may keep equal pages once, which then stay in cache.
    """
    if case.shape is None:
        return [np.random.default_rng(0).random(case.read_bytes // 4, np.float32)]
    names = ("wi_0", "wi_1", "wo") if case.subject == "layer" else ("wi_0",)
    active = [expert for expert, _ in routing_of(case.place, case.dtype).groups()]
    stacks = [read_array(case.place, name) for name in names]
    pieces = [stack[expert].reshape(-1).view(np.float32) for expert in active for stack in stacks]
    touch(*pieces)
    return pieces


def numpy_read(case: Case) -> Prepared:
    """Prepare a dot product of each piece with itself, the pieces shared over threads."""
    pool = ThreadPoolExecutor(num_cores())
    pieces = [piece for array in read_operands(case) for piece in np.array_split(array, max(array.size // PIECE, 1))]
    return Prepared(run=lambda: list(pool.map(lambda piece: np.dot(piece, piece), pieces)) and None)


def xla_read(case: Case) -> Prepared:
    """Prepare a maximum over rows of 1024."""
    import jax

    from raggedmoe.interop.arrays import to_device

    arrays = [to_device(array[: array.size // 1024 * 1024].reshape(-1, 1024)) for array in read_operands(case)]
    read = jax.jit(lambda arrays: [array.max(-1) for array in arrays]).lower(arrays).compile()
    return Prepared(run=lambda: jax.block_until_ready(read(arrays)) and None)


def torch_read(case: Case) -> Prepared:
    """Prepare a sum."""
    import torch

    tensors = [torch.from_numpy(array) for array in read_operands(case)]

    def run() -> None:
        with torch.inference_mode():
            for tensor in tensors:
                tensor.sum()

    return Prepared(run=run)


_register_matmuls()
