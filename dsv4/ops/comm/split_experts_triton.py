# mypy: ignore-errors
"""`split_experts` on a GPU: the launches of `experts`, with an exchange in between."""

from dataclasses import replace

from dsv4.ops.gemm.weights.a8 import A8Mxfp4
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.a8 import experts_a8_triton

TILE, PAIRED = 64, 32  # rows of W2, and of each half of W13, that lie in one tile


def supports(x, experts, weights, by, gather) -> str | None:
    inner, size = by.w13.shape[1] // 2, by.w2.shape[1]
    if inner % PAIRED or size % TILE:
        return f"{inner} inner rows and {size} rows on a rank cut through tiles"
    if isinstance(by.w13, A8Mxfp4):
        return experts_a8_triton.supports(x, experts, weights, by)
    given = replace(by, shared_w13=by.w13, shared_w2=by.w2)
    return experts_triton.supports(x, experts, weights, given)


def run(x, experts, weights, by, gather):
    if isinstance(by.w13, A8Mxfp4):
        given = {"with_shared": False, "gather": gather}
        return experts_a8_triton.partial_sums(x, experts, weights, by, **given)[0]
    by = replace(by, shared_w13=None, shared_w2=None)
    return experts_triton.launch(x, experts, weights, by, partial=True, gather=gather)
