"""`python -m raggedmoe.kernels.native`: build the C++ kernels, if there is a compiler."""

from raggedmoe.kernels.native.library import build

print(build())
