"""Translation of MaxText's settings of quantisation into ours."""

from collections.abc import Mapping

from raggedmoe.interop.maxtext_defaults import is_same
from raggedmoe.kernels.quant_config import QUANTIZATIONS
from raggedmoe.kernels.quantize import LARGEST

NAMES = (
    "quantization",
    "use_qwix_quantization",
    "weight_quantization_calibration_method",
    "act_quantization_calibration_method",
    "bwd_quantization_calibration_method",
)
# Whose calibration each is: the operand of a `QuantConfig`, and our setting of its scale.
CALIBRATED = {
    "weight_quantization_calibration_method": ("weights", "quantization_weight_scale"),
    "act_quantization_calibration_method": ("rows", "quantization_row_scale"),
    "bwd_quantization_calibration_method": ("cotangents", "quantization_cotangent_scale"),
}
WORDS = {"fp8_full": "fp8", **{name: name for name in QUANTIZATIONS}}
EXPERTS_ALONE = "of the experts' matmuls alone: attention, dense layers and the head are multiplied in dtype"
ENGINE = "Transformer Engine is not used"
# What is in a word of MaxText that is refused, the longer ones first, and why.
REFUSED = {
    "te_fp8_delayedscaling": f"{ENGINE}; its delayed scales are those of quantization=fp8 quantization_history=1024",
    "te_fp8_currentscaling": f"{ENGINE}; its scales, of each call's largest value, are those of quantization=fp8",
    "te_mxfp8": f"{ENGINE}, and training has no shared exponents; use quantization=fp8 quantization_block=32",
    "te_nvfp4": f"{ENGINE}, and nothing is trained in 4 bits; use quantization=fp8",
    "te_": f"{ENGINE}; use quantization=fp8",
    "int4": "nothing is trained in 4 bits; use quantization=int8",
    "w4a8": "nothing is trained in 4 bits; use quantization=int8_weights",
    "intmp": "one format is for all layers; use quantization=int8",
    "nanoo": "AMD's fp8 is not built; use quantization=fp8",
    "fp8_gpu": "cuDNN's matmuls of fp8 are not used; use quantization=fp8",
    "aqt_fp8": "AQT is not used; use quantization=fp8",
}


def translate_quantization(typed: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Translate what is quantised and how its scales are made: settings of ours, and a note for the user."""
    word = typed.get("quantization", "").lower()
    calibrations = {name: typed[name] for name in CALIBRATED if not is_same(typed.get(name, "absmax"), "absmax")}
    if is_same(word, ""):
        note = f"ignored: {', '.join(calibrations)} is read with quantization alone" if calibrations else None
        return {"quantization": "none"} if "quantization" in typed else {}, note
    for part, reason in REFUSED.items():
        if part in word:
            raise ValueError(f"quantization={word}: {reason}")
    if word not in WORDS:
        raise ValueError(f"quantization: expected one of none, {', '.join(WORDS)}, got {word!r}")
    settings, note = {"quantization": WORDS[word]}, EXPERTS_ALONE
    if word == "fp8":
        note += "; in MaxText fp8 leaves the experts out and has gradients in e4m3, fp8_full is what this is"
    config = QUANTIZATIONS[WORDS[word]]
    for name, method in calibrations.items():
        operand, ours = CALIBRATED[name]
        qtype = getattr(config, operand)
        if qtype is None:
            note += f"; {name} is ignored, as {operand} are not quantised"
        else:
            settings[ours] = str(_bound(name, method) / LARGEST[qtype])
    return settings, note


def _bound(name: str, method: str) -> float:
    """Read the largest absolute value from a calibration such as ``fixed,-224,224``."""
    parts = [part.strip() for part in method.lower().split(",")]
    try:
        least, most = (float(part) for part in parts[1:])
    except ValueError:
        least, most = 0.0, 0.0
    if parts[0] != "fixed" or not most > 0 or least != -most:
        raise ValueError(f"{name}={method}: expected absmax, or fixed,-a,a with a > 0; there is no other calibration")
    return most
