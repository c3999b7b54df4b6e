"""Tile sizes of the TensorCore kernel of `grouped_matmul`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the kernel cuts its work."""

    rows: int = 512  # of a full chunk
    step: int = 32  # chunks come in sizes of whole steps
    smallest: int = 128
    out: int  # columns of a matrix at a time
    inner: int  # of the contraction at a time, in straight code
    packed: int = 16  # rows that share a tile of memory
    piece_rows: int = 128  # of one matmul
    piece_columns: int = 256
    paired: bool = True  # two full chunks in one piece of straight code
    slots: int = 4  # chunks in flight
    matrix_slots: int = 4
    vmem_limit: int = 60 << 20

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(range(self.smallest, self.rows + 1, self.step))
