"""(a) deepseek-ai's own files: MXFP4 experts, FP8 attention, E8M0 scales throughout."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    return facts.experts == {"mxfp4"} and facts.scale_names == {"scale"}


def _claims(facts: Facts) -> list[str]:
    if facts.method in ("compressed-tensors", "modelopt"):
        return [f"config.json says quant_method {facts.method!r}, the experts are MXFP4"]
    return []


LAYOUT = Layout("official", "official FP8 + MXFP4 experts", _matches, _claims)
