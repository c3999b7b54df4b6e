"""A package, so that test files import each other by their whole names: `from tests.kernels.compare import …`."""
