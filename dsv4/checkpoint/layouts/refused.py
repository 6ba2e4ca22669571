"""Layouts that are recognised but not supported, with what to download instead."""

from typing import Any

from dsv4.checkpoint.findings import Finding

_INSTEAD = "fetch the official release or a ModelOpt NVFP4 one instead"

_METHODS = {
    "quark": "Quark MXFP4/NVFP4",
    "awq": "AWQ (INT4)",
    "gptq": "GPTQ (INT4)",
    "exl3": "EXL3",
    "exl2": "EXL2",
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
    "ascend": "Ascend",
    "auto-round": "AutoRound (INT4)",
    "hqq": "HQQ",
    "torchao": "torchao",
}
# suffix of a tensor name -> what it means
_SUFFIXES = {
    ".qweight": "an AWQ or GPTQ INT4 packing",
    ".qzeros": "an AWQ or GPTQ INT4 packing",
    ".g_idx": "a GPTQ packing",
    ".weight_zero_point": "an INT4 packing with zero points",
    ".weight_offset": "an Ascend packing",
    ".pre_quant_scale": "AWQ or SmoothQuant, which needs a factor on every input channel",
    ".input_scale_2": "Quark NVFP4",
    ".trellis": "EXL3",
    ".bias_vl": "DeepSeek-V4.1 or a vision model",
    ".engram.embed.weight": "DeepSeek-V4.1 (Engram tables)",
}


def refusal(quantization: dict[str, Any], names: list[str]) -> Finding | None:
    """Why this checkpoint is not supported, or None."""
    method = str(quantization.get("quant_method", "")).lower()
    if method in _METHODS:
        return Finding(
            "error",
            "layout",
            f"quant_method {method!r} is {_METHODS[method]}, which is not supported; {_INSTEAD}",
            file="config.json",
        )
    group = quantization.get("group_size")
    if isinstance(group, int) and group not in (-1, 0, 16, 32):
        return Finding(
            "error",
            "layout",
            f"group_size is {group}; only groups of 16 (NVFP4) and 32 (MXFP4) are read; {_INSTEAD}",
            file="config.json",
        )
    suffixes = tuple(_SUFFIXES)
    for name in names:
        if name.endswith(suffixes) and not name.startswith("mtp."):
            meaning = next(text for suffix, text in _SUFFIXES.items() if name.endswith(suffix))
            message = f"belongs to {meaning}, which is not supported; {_INSTEAD}"
            return Finding("error", "layout", message, name)
    return None
