"""(c) ModelOpt NVFP4 for the routed experts only; the rest as in the official files or BF16."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    multiplies = facts.experts == {"nvfp4"} and not facts.global_divides
    return multiplies and "nvfp4" not in facts.dense


def _claims(facts: Facts) -> list[str]:
    if facts.method == "compressed-tensors":
        return [
            "config.json says quant_method 'compressed-tensors' (whose globals divide), the "
            "experts carry ModelOpt's weight_scale_2 (which multiplies)"
        ]
    return []


LAYOUT = Layout("modelopt-experts", "ModelOpt NVFP4, experts only", _matches, _claims)
