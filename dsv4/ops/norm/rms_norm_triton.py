# mypy: ignore-errors
"""`rms_norm` on a GPU: one program per row; the tile depends only on the row's length."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import ROW_WARPS, device_reason, launch_options


@triton.jit
def norm_row(x, weight, out, row, x_stride, eps, SIZE: tl.constexpr, WEIGHTED: tl.constexpr):
    channel = tl.arange(0, triton.next_power_of_2(SIZE))
    live = channel < SIZE
    wide = tl.load(x + row * x_stride + channel, mask=live, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if WEIGHTED:
        wide = wide * tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + channel, wide.to(out.dtype.element_ty), mask=live)


@triton.jit
def _rms_norm_kernel(x, weight, out, x_stride, eps, SIZE: tl.constexpr, WEIGHTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    norm_row(x, weight, out, row, x_stride, eps, SIZE, WEIGHTED)


def supports(x, weight, eps) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16) or x.stride(-1) != 1:
        return f"x is {x.dtype} with strides {x.stride()}, kernels read bfloat16 or float32 rows"
    if x.dim() > 2 and not x.is_contiguous():
        return f"x has strides {x.stride()}, kernels read rows or contiguous tensors"
    return device_reason(x.device)


def run(x, weight, eps):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    rows = x if x.dim() == 2 else x.view(-1, size)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, rows if weight is None else weight, out, rows.stride(0), eps, SIZE=size,
        WEIGHTED=weight is not None, **launch_options(ROW_WARPS),
    )  # fmt: skip
    return out
