# mypy: ignore-errors
"""Dequantises NVFP4 and FP8 weights for launches with many rows, which reread them."""

import torch
import triton
import triton.language as tl

from dsv4.formats.quantized import Fp8BlockTensor
from dsv4.ops.core.helpers_device import from_e4m3
from dsv4.ops.core.launch import interpreting, launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.dot_device import power_of, whole_tile
from dsv4.ops.gemm.weights.tiled import TiledNvfp4


@triton.jit
def _expand_kernel(words, codes, out, total_steps, ASM: tl.constexpr):
    """One tile as bf16, without the global scale."""
    step = tl.program_id(0)
    row_tile = tl.program_id(1).to(tl.int64)
    rn = tl.arange(0, 64)
    tile = row_tile * total_steps + step
    w_ptrs = words + tile * 2048 + (rn * 16)[:, None] + tl.arange(0, 16)[None, :]
    code = tl.load(codes.to(tl.pointer_type(tl.int64), bitcast=True) + tile * 64 + rn)
    weights = whole_tile(tl.load(w_ptrs), tl.load(w_ptrs + 1024), code, 64, ASM)
    row = (row_tile * 64 + rn) * (total_steps * 128) + step * 128
    tl.store(out + row[:, None] + tl.arange(0, 128)[None, :], weights)


@triton.jit
def _expand_fp8_kernel(
    codes, scales, out, size, num_columns, tile_rows, block, BN: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    column = tl.program_id(0) * BK + tl.arange(0, BK)[None, :]
    live = (row < size) & (column < num_columns)
    at = row.to(tl.int64) * num_columns + column
    factor = row // tile_rows * tl.cdiv(num_columns, block) + column // block
    values = from_e4m3(tl.load(codes + at, mask=live, other=0), tl.bfloat16)
    values = values * power_of(tl.load(scales + factor, mask=live, other=0))
    tl.store(out + at, values, mask=live)


def expand(weights: list[TiledNvfp4] | list[Fp8BlockTensor]) -> list[torch.Tensor]:
    """The weights in bf16, in a workspace: NVFP4 without the global scale; FP8, whose scales must
    be powers of two, exactly."""
    if isinstance(weights[0], Fp8BlockTensor):
        return _expand_fp8(weights)
    sizes = [4 * weight.packed.numel() for weight in weights]
    outs = _room(weights, sizes)
    for weight, out in zip(weights, outs, strict=True):
        row_tiles, steps = weight.packed.shape[:2]
        _expand_kernel[(steps, row_tiles)](
            weight.packed, weight.scale, out, steps, ASM=not interpreting(), **launch_options(4)
        )
    return outs


def _expand_fp8(weights: list[Fp8BlockTensor]) -> list[torch.Tensor]:
    outs = _room(weights, [weight.data.numel() for weight in weights])
    for weight, out in zip(weights, outs, strict=True):
        size, columns = weight.shape
        _expand_fp8_kernel[(triton.cdiv(columns, 128), triton.cdiv(size, 64))](
            weight.data.view(torch.uint8), weight.scale, out, size, columns, *weight.tile, BN=64,
            BK=128, **launch_options(4),
        )  # fmt: skip
    return outs


def _room(weights: list, sizes: list[int]) -> list[torch.Tensor]:
    room = workspace(weights[0].device, "expanded", sum(sizes), torch.bfloat16)
    return list(room[: sum(sizes)].split(sizes))
