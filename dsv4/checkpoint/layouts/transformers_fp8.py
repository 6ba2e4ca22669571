"""transformers' fine-grained FP8: FP8 tiles under its own names, scales of the experts stacked."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    stacked = {"gate_up_proj_scale_inv", "down_proj_scale_inv"}
    return facts.experts == {"fp8"} and facts.scale_names <= {"weight_scale_inv", *stacked}


def _claims(facts: Facts) -> list[str]:
    if facts.method in ("compressed-tensors", "modelopt"):
        return [
            f"config.json says quant_method {facts.method!r}, the experts are FP8 tiles with "
            "transformers' names"
        ]
    return []


LAYOUT = Layout("transformers-fp8", "transformers fine-grained FP8", _matches, _claims)
