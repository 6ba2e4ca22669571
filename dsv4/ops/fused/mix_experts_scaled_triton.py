# mypy: ignore-errors
"""The mHC boundary, router and experts, with low-precision activations (sm_100): the boundary also
stores its row quantised for the first product. Same bits as the ops one by one."""

from dsv4.ops.fused.mix_linear_scaled_triton import mix_quantized, row_reason
from dsv4.ops.gemm import linear_scaled_triton
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.mhc.mix import Residual, Update
from dsv4.ops.moe import experts_scaled_triton, experts_triton, router_triton


def _readers(experts) -> list[ScaledTensor]:
    """Experts with low-precision inputs; the first decides the format."""
    return [w for w in (experts.shared_w13, experts.w13) if isinstance(w, ScaledTensor)]


def _kernels(experts):
    return experts_scaled_triton if isinstance(experts.w13, ScaledTensor) else experts_triton


def supports(residual, site, token_ids, gate, experts) -> str | None:
    if not _readers(experts):
        return "no weight asks for activations of few bits"
    x = residual.streams[:, 0]  # of the row's kind
    return (
        row_reason(residual, site)
        or linear_scaled_triton.rows_reason(x)
        or router_triton.supports(x, token_ids, gate)
        or _kernels(experts).weights_reason(x, experts)
    )


def run(residual, site, token_ids, gate, experts) -> Residual:
    streams, x, post, comb, rows = mix_quantized(residual, site, _readers(experts)[0])
    chosen, weights = router_triton.run(x, token_ids, gate)
    y = _kernels(experts).launch(x, chosen, weights, experts, ready=rows)
    return Residual(streams, Update(y, post, comb))
