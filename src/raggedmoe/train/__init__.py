"""Training: `raggedmoe.train(config)` runs what the modules of this package are the parts of."""

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    """This package, which is called `raggedmoe.train` as the function that trains is, and so can be called as it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from raggedmoe.train.loop.loop import train  # it imports grain, orbax and optax

        return train(*args, **options)


sys.modules[__name__].__class__ = _Train
