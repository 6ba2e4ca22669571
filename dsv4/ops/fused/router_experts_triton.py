# mypy: ignore-errors
"""`router` and `experts` of one token, for `mhc_boundary`: the result is partial sums; their total
has the same bits as the two ops."""

from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.moe import experts_single_token_triton, experts_triton, router_triton
from dsv4.ops.moe.experts_end_triton import is_separate


def supports(x, token_ids, gate, experts) -> str | None:
    if x.shape[0] != 1:
        return "more than one token"
    if is_separate(experts) and not experts_single_token_triton.separate_streams(x, experts):
        return "a shared expert in another format"
    reason = router_triton.supports(x, token_ids, gate)
    return reason or experts_triton.weights_reason(x, experts)


def run(x, token_ids, gate, experts) -> PartialSums:
    kernels = experts_single_token_triton
    launch = kernels.launch_separate if is_separate(experts) else kernels.launch_routed
    expert_sums = launch(x, token_ids, gate, experts)
    return PartialSums(expert_sums[:, :, None], None, x.dtype)
