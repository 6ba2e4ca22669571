# mypy: ignore-errors
"""`expert_sums` on a GPU: the launches of `experts` without its last one."""

from dataclasses import replace

from dsv4.ops.comm.sharded import ExpertSums
from dsv4.ops.gemm.weights.a8 import A8Mxfp4
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.a8 import experts_a8_triton
from dsv4.ops.moe.experts_end_triton import is_separate
from dsv4.ops.moe.experts_triton import launch, separate_output


def supports(x, experts, weights, by, with_shared) -> str | None:
    if isinstance(by.w13, A8Mxfp4):
        return experts_a8_triton.supports(x, experts, weights, by)
    given = by if with_shared else replace(by, shared_w13=by.w13, shared_w2=by.w2)
    return experts_triton.supports(x, experts, weights, given)


def run(x, experts, weights, by, with_shared):
    if isinstance(by.w13, A8Mxfp4):
        found = experts_a8_triton.partial_sums(x, experts, weights, by, with_shared=with_shared)
        return ExpertSums(*found)
    extra = None
    if with_shared and is_separate(by):
        extra = separate_output(x, by.shared_w13, by.shared_w2, by.limit)
    if not with_shared or extra is not None:
        by = replace(by, shared_w13=None, shared_w2=None)
    return ExpertSums(launch(x, experts, weights, by, partial=True), extra)
