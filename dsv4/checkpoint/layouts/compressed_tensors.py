"""(e) compressed-tensors: NVFP4 with a global that divides, FP8 tiles for attention."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    return facts.global_divides


def _claims(facts: Facts) -> list[str]:
    if facts.method == "modelopt":
        return [
            "config.json says quant_method 'modelopt' (whose globals multiply), the tensors "
            "carry weight_global_scale (which divides)"
        ]
    return []


LAYOUT = Layout("compressed-tensors", "compressed-tensors NVFP4", _matches, _claims)
