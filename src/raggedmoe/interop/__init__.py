"""Checkpoints: `load` a model from a Hugging Face folder or one of ours, `save` it as either."""

from raggedmoe.interop.load import load as load
from raggedmoe.interop.native import save as save_native
from raggedmoe.interop.save import save as save

__all__ = ["load", "save", "save_native"]
