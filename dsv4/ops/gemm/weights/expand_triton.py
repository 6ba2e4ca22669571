# mypy: ignore-errors
"""Dequantises NVFP4 weights for launches with many rows, which reread them."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import interpreting, launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.dot_device import whole_tile
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


def expand(weights: list[TiledNvfp4]) -> list[torch.Tensor]:
    """The weights in bf16, without their global scales, in a workspace."""
    sizes = [4 * weight.packed.numel() for weight in weights]
    room = workspace(weights[0].device, "expanded", sum(sizes), torch.bfloat16)
    outs = list(room[: sum(sizes)].split(sizes))
    for weight, out in zip(weights, outs, strict=True):
        row_tiles, steps = weight.packed.shape[:2]
        _expand_kernel[(steps, row_tiles)](
            weight.packed, weight.scale, out, steps, ASM=not interpreting(), **launch_options(4)
        )
    return outs
