# mypy: ignore-errors
"""The mHC boundary and the matrices of attention's input, with low-precision activations (sm_100).

The kernel that computes the normalised row has it in registers, so it also stores it quantised for
the product, which saves a launch. Same bits as the ops one by one.
"""

from dsv4.ops.gemm import linear_scaled_triton
from dsv4.ops.gemm.quantize_rows_triton import row_fits
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.mhc import mix_triton


def row_reason(residual, site) -> str | None:
    """Why the boundary cannot store its row quantised, or None."""
    tokens, _, size = residual.streams.shape
    if tokens == 0 or not row_fits(size):
        return f"{tokens} rows of {size}, kernels need one at least and more than 128 columns"
    return mix_triton.supports(residual.streams, site, *residual.pending)


def mix_quantized(residual, site, reader):
    """-> streams, x, post, comb and the rows of `x` as `reader`, a ScaledTensor, takes them."""
    streams = residual.streams
    rows = linear_scaled_triton.ready_rows(streams[:, 0], reader)
    *updated, x, post, comb = mix_triton.run(streams, site, *residual.pending, rows=rows)
    return updated[0] if updated else streams, x, post, comb, rows


def supports(residual, site, weights, dtypes) -> str | None:
    if not any(isinstance(weight, ScaledTensor) for weight in weights):
        return "no weight asks for activations of few bits"
    x = residual.streams[:, 0]  # of the row's kind
    return row_reason(residual, site) or linear_scaled_triton.supports(x, weights, dtypes)


def run(residual, site, weights, dtypes):
    reader = next(weight for weight in weights if isinstance(weight, ScaledTensor))
    streams, x, post, comb, rows = mix_quantized(residual, site, reader)
    return streams, post, comb, linear_scaled_triton.run(x, weights, dtypes, ready=rows)
