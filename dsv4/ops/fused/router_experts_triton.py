# mypy: ignore-errors
"""`router` and `experts` of one token, for `mhc_boundary`: the result is partial sums, whose total
has the bits of the two ops."""

from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.moe import experts_single_token_triton, experts_triton, router_triton
from dsv4.ops.moe.shared_expert_triton import is_apart


def supports(router, experts) -> str | None:
    if router["x"].shape[0] != 1:
        return "more than one token"
    if is_apart(experts["shared_w13"], experts["w13"]):
        return "a shared expert in another format"
    return router_triton.supports(**router) or experts_triton.weights_reason(
        router["x"], experts["w13"], experts["w2"], experts["shared_w13"], experts["shared_w2"]
    )


def run(router, experts) -> PartialSums:
    parts = experts_single_token_triton.launch_routed(**router, **experts)
    return PartialSums(parts[:, :, None], None, router["x"].dtype)
