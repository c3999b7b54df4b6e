"""How far rounding may take the value and the gradients of `ragged_gather`: they are sums of weighted rows."""

import functools

from raggedmoe.kernels.ragged_gather.api import ragged_gather
from raggedmoe.kernels.sum_bound import sum_error_bounds

error_bounds = functools.partial(sum_error_bounds, ragged_gather)
