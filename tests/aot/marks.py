"""Which tests need the TPU compiler."""

import pytest

from raggedmoe.kernels.proof import libtpu_version

NEEDS_LIBTPU = [
    pytest.mark.tpu,
    pytest.mark.skipif(libtpu_version() is None, reason="needs libtpu, the TPU compiler: pip install 'raggedmoe[tpu]'"),
]
