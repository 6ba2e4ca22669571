"""(f) no quantisation: BF16 or FP32 under any of the three name families."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    return facts.experts == {"plain"} and facts.dense == {"plain"}


def _claims(facts: Facts) -> list[str]:
    if facts.method:
        return [f"config.json says quant_method {facts.method!r}, no tensor is quantised"]
    return []


LAYOUT = Layout("plain", "unquantised", _matches, _claims)
