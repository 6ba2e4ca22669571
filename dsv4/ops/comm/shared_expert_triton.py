# mypy: ignore-errors
"""`shared_expert` on a GPU: as a stack of one routed expert with weight 1, or two linear ops."""

from dsv4.ops.core.launch import device_reason
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.experts_triton import apart_part


def supports(x, w13, w2, limit) -> str | None:
    return device_reason(x.device) or experts_triton.apart_reason(w13, w2)


def run(x, w13, w2, limit):
    return apart_part(x, w13, w2, limit)
