"""How far rounding may take the value and the gradients of `ragged_gather_reduce`: they are sums of weighted rows."""

import functools

from raggedmoe.kernels.ragged_gather_reduce.api import ragged_gather_reduce
from raggedmoe.kernels.sum_bound import sum_error_bounds

error_bounds = functools.partial(sum_error_bounds, ragged_gather_reduce)
