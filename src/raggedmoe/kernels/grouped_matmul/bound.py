"""How far rounding may take the value and the gradients of `grouped_matmul`: they are sums of products."""

import functools

from raggedmoe.kernels.grouped_matmul.api import grouped_matmul
from raggedmoe.kernels.sum_bound import sum_error_bounds

error_bounds = functools.partial(sum_error_bounds, grouped_matmul)
