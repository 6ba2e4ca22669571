"""(d) ModelOpt NVFP4 for the experts and attention; some files leave a few linears in BF16."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    multiplies = facts.experts == {"nvfp4"} and not facts.global_divides
    return multiplies and "nvfp4" in facts.attention


def _claims(facts: Facts) -> list[str]:
    if facts.method == "compressed-tensors":
        return [
            "config.json says quant_method 'compressed-tensors' (whose globals divide), the "
            "tensors carry ModelOpt's weight_scale_2 (which multiplies)"
        ]
    return []


LAYOUT = Layout("modelopt-full", "ModelOpt NVFP4, experts and attention", _matches, _claims)
