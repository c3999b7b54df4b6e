"""Checkpoints of others, in and out: `load` a folder, `save` one."""

from raggedmoe.interop.load import load as load
from raggedmoe.interop.native import save as save_native
from raggedmoe.interop.save import save as save

__all__ = ["load", "save", "save_native"]
