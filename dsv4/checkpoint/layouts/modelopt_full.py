"""(d) ModelOpt NVFP4 for every linear layer; transformers names as published, official accepted."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    return not facts.global_divides and facts.experts == {"nvfp4"}


def _claims(facts: Facts) -> list[str]:
    if facts.method == "compressed-tensors":
        return [
            "config.json says quant_method 'compressed-tensors' (whose globals divide), the "
            "tensors carry ModelOpt's weight_scale_2 (which multiplies)"
        ]
    return []


LAYOUT = Layout("modelopt-full", "ModelOpt NVFP4, every linear layer", _matches, _claims)
