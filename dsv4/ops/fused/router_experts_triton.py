# mypy: ignore-errors
"""`router` and `experts` of one token, for `mhc_boundary`: the result is partial sums; their total
has the same bits as the two ops."""

from importlib import import_module

from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.gemm.weights.a8 import A8Mxfp4
from dsv4.ops.moe import experts_single_token_triton, experts_triton, router_triton
from dsv4.ops.moe.a8 import experts_a8_triton
from dsv4.ops.moe.experts_end_triton import is_separate


def supports(x, token_ids, gate, experts) -> str | None:
    if x.shape[0] != 1:
        return "more than one token"
    if experts_a8_triton.fits_stream(x, experts):
        return router_triton.supports(x, token_ids, gate)
    if is_separate(experts) and not experts_single_token_triton.separate_streams(x, experts):
        return "a shared expert in another format"
    reason = router_triton.supports(x, token_ids, gate)
    return reason or experts_triton.weights_reason(x, experts)


def run(x, token_ids, gate, experts) -> PartialSums:
    kernels = experts_single_token_triton
    if isinstance(experts.w13, A8Mxfp4):
        launch = import_module("dsv4.ops.moe.a8.experts_a8_stream_gluon").run
    else:
        launch = kernels.launch_separate if is_separate(experts) else kernels.launch_routed
    expert_sums = launch(x, token_ids, gate, experts)
    return PartialSums(expert_sums[:, :, None], None, x.dtype)
