"""(a') the Base models (float32 scales) and (b) FP8 repacks (E8M0 scales): FP8 experts."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    return facts.experts == {"fp8"} and facts.scale_names == {"scale"}


def _claims(facts: Facts) -> list[str]:
    if facts.method in ("compressed-tensors", "modelopt"):
        return [f"config.json says quant_method {facts.method!r}, the experts are FP8 tiles"]
    return []


LAYOUT = Layout("official-fp8", "official names, FP8 experts (Base or repack)", _matches, _claims)
