# mypy: ignore-errors
"""`expert_sums` on a GPU: the launches of `experts` without its last one."""

from dsv4.ops.comm.shares import ExpertSums
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.experts_triton import launch, separate_output
from dsv4.ops.moe.shared_expert_triton import is_separate


def supports(x, experts, weights, w13, w2, shared_w13, shared_w2, limit, with_shared) -> str | None:
    shared = (shared_w13, shared_w2) if with_shared else (w13, w2)
    return experts_triton.supports(x, experts, weights, w13, w2, *shared, limit)


def run(x, experts, weights, w13, w2, shared_w13, shared_w2, limit, with_shared):
    extra = None
    if with_shared and is_separate(shared_w13, w13):
        extra = separate_output(x, shared_w13, shared_w2, limit)
    if not with_shared or extra is not None:
        shared_w13 = shared_w2 = None
    routed = (x, experts, weights, w13, w2)
    return ExpertSums(launch(*routed, shared_w13, shared_w2, limit, partial=True), extra)
