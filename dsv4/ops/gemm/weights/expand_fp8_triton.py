# mypy: ignore-errors
"""Dequantises FP8 weights with power-of-two scales, exactly, for launches with many rows."""

import torch
import triton
import triton.language as tl

from dsv4.formats.quantized import Fp8BlockTensor
from dsv4.ops.core.helpers_device import from_e4m3
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.dot_device import power_of


@triton.jit
def _expand_fp8_kernel(
    codes, scales, out, size, num_columns, tile_rows, block, BN: tl.constexpr, BK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """ONE: all weights of a program have the same scale."""
    row = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    column = tl.program_id(0) * BK + tl.arange(0, BK)[None, :]
    live = (row < size) & (column < num_columns)
    at = row.to(tl.int64) * num_columns + column
    values = from_e4m3(tl.load(codes + at, mask=live, other=0), tl.bfloat16)
    blocks = tl.cdiv(num_columns, block)
    if ONE:
        at_scale = tl.program_id(1) * BN // tile_rows * blocks + tl.program_id(0) * BK // block
        values = values * power_of(tl.load(scales + at_scale))
    else:
        factor = row // tile_rows * blocks + column // block
        values = values * power_of(tl.load(scales + factor, mask=live, other=0))
    tl.store(out + at, values, mask=live)


def expand_fp8(weights: list[Fp8BlockTensor]) -> list[torch.Tensor]:
    """The weights in bf16, in a workspace."""
    sizes = [weight.data.numel() for weight in weights]
    room = workspace(weights[0].device, "expanded", sum(sizes), torch.bfloat16)
    outs = list(room[: sum(sizes)].split(sizes))
    for weight, out in zip(weights, outs, strict=True):
        size, columns = weight.shape
        _expand_fp8_kernel[(triton.cdiv(columns, 128), triton.cdiv(size, 64))](
            weight.data.view(torch.uint8), weight.scale, out, size, columns, *weight.tile, BN=64,
            BK=128, ONE=weight.tile[0] % 64 == weight.tile[1] % 128 == 0, **launch_options(4),
        )  # fmt: skip
    return outs
