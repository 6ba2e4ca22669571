"""ModelOpt's other recipes: MXFP4, MXFP8, FP8 per tensor, row or tile, NVFP4 for some layers."""

from dsv4.checkpoint.layouts import Facts, Layout


def _matches(facts: Facts) -> bool:
    return facts.method == "modelopt" and bool((facts.experts | facts.dense) - {"plain"})


def _claims(facts: Facts) -> list[str]:
    return []


LAYOUT = Layout("modelopt", "ModelOpt", _matches, _claims)
