# mypy: ignore-errors
"""`rope` on a GPU: one program per token and group of HEADS vectors."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import device_reason, launch_options
from dsv4.ops.kv.rope_device import rope_tile

HEADS = 16


@triton.jit
def _rope_kernel(
    x, out, positions, frequencies, num_heads, SIGN: tl.constexpr, BH: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(positions + row)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel = tl.arange(0, PAD)
    at = ((row.to(tl.int64) * num_heads + head) * DIM)[:, None] + channel[None, :]
    mask = (head < num_heads)[:, None] & (channel < DIM)[None, :]
    value = tl.load(x + at, mask=mask, other=0.0)
    turned = rope_tile(
        value.to(tl.float32), position, frequencies, SIGN, BH, DIM - ROPE, DIM, PAD
    )  # fmt: skip
    tl.store(out + at, turned.to(out.dtype.element_ty), mask=mask)


def supports(x, positions, frequencies, inverse) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
        return f"x is {x.dtype} with strides {x.stride()}, not contiguous bfloat16 or float32"
    if x.shape[-1] % 2 or not positions.is_contiguous():
        return f"x has {x.shape[-1]} channels, positions strides {positions.stride()}"
    return device_reason(x.device)


def run(x, positions, frequencies, inverse):
    out = torch.empty_like(x)
    dim = x.shape[-1]
    heads = x.numel() // (x.shape[0] * dim)
    block = min(HEADS, triton.next_power_of_2(heads))
    _rope_kernel[(x.shape[0], triton.cdiv(heads, block))](
        x, out, positions, frequencies, heads, SIGN=-1.0 if inverse else 1.0, BH=block, DIM=dim,
        PAD=triton.next_power_of_2(dim), ROPE=2 * frequencies.shape[0], **launch_options(4),
    )  # fmt: skip
    return out
