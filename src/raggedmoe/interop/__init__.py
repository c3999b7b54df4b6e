"""Checkpoints: `load` a model from a Hugging Face folder or one of ours, `save` it as either, `quantise` a folder."""

from raggedmoe.interop.load import load as load
from raggedmoe.interop.native import save as save_native
from raggedmoe.interop.peft import save_peft as save_peft
from raggedmoe.interop.quantise import TensorError as TensorError
from raggedmoe.interop.quantise import quantise as quantise
from raggedmoe.interop.save import save as save

__all__ = ["TensorError", "load", "quantise", "save", "save_native", "save_peft"]
