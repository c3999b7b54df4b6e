"""How the kernel cuts rows and columns into pieces of code."""

import pytest

from raggedmoe.kernels.grouped_matmul.row_steps_kernel import column_pieces, row_pieces


@pytest.mark.parametrize("packed", [16, 32])
@pytest.mark.parametrize("longest", [64, 128, 256])
def test_pieces_cover_all_once_and_are_about_as_long_as_they_may_be(longest, packed):
    for length in range(packed, 1040, packed):
        rows, columns = row_pieces(length, longest, packed), column_pieces(length, longest)
        for pieces in rows, columns:
            assert [place for piece in pieces for place in range(piece.start, piece.stop)] == list(range(length))
        assert all(piece.start % packed == 0 for piece in rows)
        assert all(piece.start % longest == 0 and piece.stop - piece.start <= longest for piece in columns)
        assert len(rows) == (length // longest if length >= longest else 1)  # no short one is left over
        assert all(piece.stop - piece.start < 2 * longest for piece in rows)
