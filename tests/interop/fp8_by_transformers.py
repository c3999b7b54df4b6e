"""Models that `transformers` quantises to fp8 and saves, which needs no GPU although it asks for one."""

import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer


def save_in_fp8(model: transformers.PreTrainedModel, folder: Path, block: tuple[int, int]) -> None:
    """Have `transformers` quantise a model in such blocks as it reads it, and save that.

    It refuses to without a GPU, which its kernels that multiply fp8 need; what quantises and what saves does not.
    """
    config = transformers.FineGrainedFP8Config(weight_block_size=block)
    with tempfile.TemporaryDirectory() as plain, patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        model.save_pretrained(plain)
        quantised = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.bfloat16, quantization_config=config
        )
    # By the conversions that it read with, it would write the scales of all experts as one tensor, which it does not
    # read again. Those of a model that was quantised before write them one by one, as DeepSeek publishes them.
    conversions = get_model_conversion_mapping(quantised, hf_quantizer=quantised.hf_quantizer)
    quantised._weight_conversions = [step for step in conversions if isinstance(step, WeightConverter)]
    quantised.save_pretrained(folder)
