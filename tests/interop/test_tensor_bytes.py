"""What tensors say of their bytes, and that those are on the disk when a file is said to be written."""

import os

import ml_dtypes
import numpy as np

from raggedmoe.interop.quantized import BLOCKS, SCALES, BlockFp8Tensor, Mxfp4Tensor, _mxfp4
from raggedmoe.interop.safetensors_file import NewTensor, read_header, write_file

ARRAYS = {
    "values": np.ones((4, 6), ml_dtypes.float8_e4m3fn),
    "factors": np.ones((2, 2), np.float32),
    "blocks": np.ones((3, 5, 2, 16), np.uint8),
    "exponents": np.full((3, 5, 2), 127, np.uint8),
    f"one{BLOCKS}": np.ones((5, 2, 16), np.uint8),
    f"one{SCALES}": np.full((5, 2), 127, np.uint8),
}


def written(path):
    tensors = [
        NewTensor(name=name, dtype=array.dtype, shape=array.shape, pieces=iter([array]))
        for name, array in ARRAYS.items()
    ]
    sizes = []
    write_file(path, tensors, {}, sizes.append)
    return sum(sizes), read_header(path)[0]


def test_bytes_are_those_of_what_is_read(tmp_path):
    """Loading is cut into pieces, and shows its progress, by them."""
    num_bytes, stored = written(tmp_path / "a.safetensors")
    assert num_bytes == sum(array.nbytes for array in ARRAYS.values())
    assert {name: tensor.num_bytes for name, tensor in stored.items()} == {
        name: array.nbytes for name, array in ARRAYS.items()
    }
    fp8 = BlockFp8Tensor(values=stored["values"], scales=stored["factors"], block=(2, 3))
    mxfp4 = Mxfp4Tensor(blocks=stored["blocks"], exponents=stored["exponents"])
    assert (fp8.num_bytes, mxfp4.num_bytes) == (4 * 6 * 2, 3 * 5 * 64 * 2)
    assert (fp8.read().nbytes, mxfp4.read().nbytes) == (fp8.num_bytes, mxfp4.num_bytes)


def test_one_matrix_of_mxfp4_is_read_as_a_stack_of_them_is(tmp_path):
    _, stored = written(tmp_path / "a.safetensors")
    read = _mxfp4({name: stored[name] for name in (f"one{BLOCKS}", f"one{SCALES}")})
    assert read[f"one{BLOCKS}"].read().size == 5 * 64


def test_all_of_a_file_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    """An fsync before the last bytes have left Python's buffer would keep a part of the file."""
    synced = []

    def record(file):
        status = os.fstat(file)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "a.safetensors"
    written(path)
    assert (path.stat().st_ino, path.stat().st_size) in synced
