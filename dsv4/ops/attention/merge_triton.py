# mypy: ignore-errors
"""The second launch of `attention` with few queries: tiles merged, output rotated back."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from dsv4.ops.device import interpreting, launch_options, start_dependents
from dsv4.ops.kv.entry_triton import rope_tile

BT = 64  # entries of a tile; changing it changes bits
LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def pieces(dim, rope_dim):
    """Widths into which an entry is cut: powers of two up to 64, the group of one scale;
    rotated channels apart."""
    widths = []
    for left in (dim - rope_dim, rope_dim):
        while left:
            widths.append(min(64, 1 << (left.bit_length() - 1)))
            left -= widths[-1]
    return tuple(widths)


@triton.constexpr_function
def piece_width(dim, rope_dim, index):
    return pieces(dim, rope_dim)[index]


@triton.constexpr_function
def piece_first(dim, rope_dim, index):
    """Where piece `index` of an entry begins."""
    return sum(pieces(dim, rope_dim)[:index])


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _merge_kernel(
    sums, stats, sink, out, positions, frequencies, num_tokens, num_heads, most, ratio,
    DIM: tl.constexpr, PAD: tl.constexpr, ROPE: tl.constexpr, BT: tl.constexpr,
    WT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    start_dependents(ASM)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    visible = tl.minimum((position + 1) // ratio, most)
    num_tiles = WT + tl.cdiv(visible, BT)
    channel = tl.arange(0, PAD)
    live = channel < DIM
    best = tl.load(sink + head).to(tl.float32) * LOG2E
    total = best * 0.0 + 1.0
    acc = tl.zeros((PAD,), tl.float32)
    for tile in tl.range(0, num_tiles):
        at = (tile * num_tokens + row) * num_heads + head
        top = tl.load(stats + at * 2)
        part = tl.load(stats + at * 2 + 1)
        piece = tl.load(sums + at * DIM + channel, mask=live, other=0.0)
        new_best = tl.maximum(best, top)
        old_share = tl.exp2(best - new_best)
        new_share = tl.exp2(top - new_best)
        total = tl.fma(part, new_share, total * old_share)
        acc = tl.fma(piece, new_share, acc * old_share)
        best = new_best
    x = (acc * (1.0 / total)).to(out.dtype.element_ty).to(tl.float32)[None, :]
    x = rope_tile(x, position, frequencies, -1.0, 1, DIM - ROPE, DIM, PAD)
    at = (row * num_heads + head) * DIM + channel[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=live[None, :])


def merge_tiles(q, sink, out, sums, stats, positions, frequencies, window, most, ratio) -> None:
    tokens, heads, dim = q.shape
    _merge_kernel[(tokens, heads)](
        sums,
        stats,
        sink,
        out,
        positions,
        frequencies,
        tokens,
        heads,
        most,
        ratio,
        DIM=dim,
        PAD=triton.next_power_of_2(dim),
        ROPE=2 * frequencies.shape[0],
        BT=BT,
        WT=triton.cdiv(window, BT),
        ASM=not interpreting(),
        **launch_options(max(1, min(4, triton.next_power_of_2(dim) // 128))),
    )


@lru_cache(maxsize=8)
def num_programs(device: torch.device) -> int:
    """Programs that run at once when one fills a multiprocessor."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
