# mypy: ignore-errors
"""The latent's norm and the query matrices after it, with low-precision activations (sm_100): the
kernel that computes the normalised row also stores it quantised. Same bits as the ops one by one.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import ROW_WARPS, launch_options
from dsv4.ops.gemm import linear_scaled_triton
from dsv4.ops.gemm.quantize_rows_triton import row_buffers, row_fits, row_format, store_row
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.norm import rms_norm_triton
from dsv4.ops.norm.rms_norm_triton import norm_row


@triton.jit
def _norm_quantize_kernel(
    x, weight, out, x_stride, eps, rows, SIZE: tl.constexpr, WEIGHTED: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value = norm_row(x, weight, out, row, x_stride, eps, SIZE, WEIGHTED)
    store_row(value, rows, row, Q)


def products_reason(latent, weights) -> str | None:
    """Why the latent cannot be stored quantised for `weights`, or None."""
    if not any(isinstance(weight, ScaledTensor) for weight in weights):
        return "no weight asks for activations of few bits"
    if latent.dim() != 2 or latent.shape[0] == 0 or not row_fits(latent.shape[1]):
        return f"{tuple(latent.shape)}: kernels need a row at least and more than 128 columns"
    return linear_scaled_triton.supports(latent, weights, [latent.dtype] * len(weights))


def latent_rows(latent, weights):
    """Buffers for the latent's rows as the first of `weights` that is a ScaledTensor takes them."""
    reader = next(weight for weight in weights if isinstance(weight, ScaledTensor))
    return linear_scaled_triton.ready_rows(latent, reader)


def products(normed, weights, rows):
    return linear_scaled_triton.run(normed, weights, [normed.dtype] * len(weights), ready=rows)


def supports(latent, norm, eps, weights) -> str | None:
    return products_reason(latent, weights) or rms_norm_triton.supports(latent, norm, eps)


def run(latent, norm, eps, weights):
    rows = latent_rows(latent, weights)
    return products(norm_quantize(latent, norm, eps, rows), weights, rows)


def norm_quantize(x, weight, eps, rows):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_quantize_kernel[(x.shape[0],)](
        x, x if weight is None else weight, out, x.stride(0), eps, row_buffers(rows, x),
        SIZE=x.shape[1], WEIGHTED=weight is not None, Q=row_format(rows),
        **launch_options(ROW_WARPS),
    )  # fmt: skip
    return out
