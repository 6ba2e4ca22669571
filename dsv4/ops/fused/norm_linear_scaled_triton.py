# mypy: ignore-errors
"""The latent's norm and the query matrices after it, with low-precision activations (sm_100): the
kernel that computes the normalised row also stores it quantised. Same bits as the ops one by one.
"""

from dsv4.ops.fused import norm_store_triton
from dsv4.ops.gemm import linear_scaled_triton
from dsv4.ops.gemm.activation_triton import row_fits
from dsv4.ops.gemm.scaled import ScaledTensor
from dsv4.ops.norm import rms_norm_triton


def _readers(linear) -> list[ScaledTensor]:
    return [weight for weight in linear["weights"] if isinstance(weight, ScaledTensor)]


def supports(norm, linear, key=None, blocks=None) -> str | None:
    """`key` and `blocks` as in norm_store_triton, or only the norm."""
    if not _readers(linear):
        return "no weight asks for activations of few bits"
    x = norm["x"]
    if x.dim() != 2 or x.shape[0] == 0 or not row_fits(x.shape[1]):
        return f"x is {tuple(x.shape)}, kernels need a row at least and more than 128 columns"
    reason = linear_scaled_triton.supports(x, **linear)
    if reason is not None:
        return reason
    if key is None:
        return rms_norm_triton.supports(**norm)
    return norm_store_triton.supports(norm, key, blocks)


def run(norm, linear, key=None, blocks=None):
    rows = linear_scaled_triton.ready_rows(norm["x"], _readers(linear)[0])
    if key is None:
        latent = rms_norm_triton.run(**norm, quantized=rows)
    else:
        latent = norm_store_triton.run(norm, key, blocks, rows)
    return linear_scaled_triton.run(latent, **linear, ready=rows)
