# mypy: ignore-errors
"""The latent's norm and the query matrices after it, with low-precision activations (sm_100): the
kernel that computes the normalised row also stores it quantised. Same bits as the ops one by one.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import ROW_WARPS, launch_options
from dsv4.ops.fused import norm_store_triton
from dsv4.ops.gemm import linear_scaled_triton
from dsv4.ops.gemm.quantize_rows_triton import row_buffers, row_constants, row_fits, store_row
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.norm import rms_norm_triton
from dsv4.ops.norm.rms_norm_triton import norm_row


@triton.jit
def _norm_quantize_kernel(
    x, weight, out, x_stride, eps, codes, scales, row_scale, columns, SIZE: tl.constexpr,
    PAD: tl.constexpr, WEIGHTED: tl.constexpr, BITS: tl.constexpr, TILED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    value = norm_row(x, weight, out, row, x_stride, eps, SIZE, PAD, WEIGHTED)
    store_row(value, codes, scales, row_scale, row, 1, columns, PAD, TILED, BITS == 8)


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
        latent = norm_quantize(**norm, rows=rows)
    else:
        latent = norm_store_triton.run(norm, key, blocks, rows)
    return linear_scaled_triton.run(latent, **linear, ready=rows)


def norm_quantize(x, weight, eps, rows):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_quantize_kernel[(x.shape[0],)](
        x, x if weight is None else weight, out, x.stride(0), eps, *row_buffers(rows, x),
        SIZE=x.shape[1], PAD=triton.next_power_of_2(x.shape[1]), WEIGHTED=weight is not None,
        **row_constants(rows), **launch_options(ROW_WARPS),
    )  # fmt: skip
    return out
