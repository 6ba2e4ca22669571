"""(e) compressed-tensors: NVFP4 with a global that divides, MXFP4, FP8 per row, tile or tensor."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    quantised = bool((facts.experts | facts.dense) - {"plain"})
    return facts.global_divides or (facts.method == "compressed-tensors" and quantised)


def _claims(facts: Facts) -> list[str]:
    if facts.method == "modelopt":
        return [
            "config.json says quant_method 'modelopt' (whose globals multiply), the tensors "
            "carry weight_global_scale (which divides)"
        ]
    return []


LAYOUT = Layout("compressed-tensors", "compressed-tensors", _matches, _claims)
