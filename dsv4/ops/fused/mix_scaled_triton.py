# mypy: ignore-errors
"""The mHC boundary and the products after it, with low-precision activations (sm_100).

The kernel that computes the normalised row has it in registers, so it also stores it quantised for
the first product, which saves a launch. Then follow the matrices of attention's input, or router
and experts. Same bits as the ops one by one.
"""

from dsv4.ops.gemm import linear_scaled_triton
from dsv4.ops.gemm.quantize_rows_triton import row_fits
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.mhc import mix_triton
from dsv4.ops.moe import experts_scaled_triton, experts_triton, router_triton


def _readers(linear, experts) -> list[ScaledTensor]:
    """Weights after the boundary with low-precision inputs; the first decides the format."""
    found = (experts["shared_w13"], experts["w13"]) if linear is None else linear["weights"]
    return [weight for weight in found if isinstance(weight, ScaledTensor)]


def _experts_module(experts):
    return experts_scaled_triton if isinstance(experts["w13"], ScaledTensor) else experts_triton


def supports(mix, linear=None, router=None, experts=None) -> str | None:
    if not _readers(linear, experts):
        return "no weight asks for activations of few bits"
    tokens, _, size = mix["streams"].shape
    if tokens == 0 or not row_fits(size):
        return f"{tokens} rows of {size}, kernels need one at least and more than 128 columns"
    reason = mix_triton.supports(**mix)
    if reason is not None:
        return reason
    x = mix["streams"][:, 0]  # of the row's kind
    if linear is not None:
        return linear_scaled_triton.supports(x, **linear)
    matrices = {name: weight for name, weight in experts.items() if name != "limit"}
    return (
        linear_scaled_triton.rows_reason(x)
        or router_triton.supports(x, **router)
        or _experts_module(experts).weights_reason(x, **matrices)
    )


def run(mix, linear=None, router=None, experts=None):
    """-> updated streams, post, comb, then the products of `linear` or the experts' result."""
    streams = mix["streams"]
    rows = linear_scaled_triton.ready_rows(streams[:, 0], _readers(linear, experts)[0])
    *updated, x, post, comb = mix_triton.run(**mix, rows=rows)
    streams = updated[0] if updated else streams
    if linear is not None:
        return streams, post, comb, linear_scaled_triton.run(x, **linear, ready=rows)
    chosen, weights = router_triton.run(x, **router)
    y = _experts_module(experts).launch(x, chosen, weights, **experts, ready=rows)
    return streams, post, comb, y
