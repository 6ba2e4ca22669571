# mypy: ignore-errors
"""How tiles of `attention` that ran in parallel become one result: in ascending order, from the
sink on. Few tiles are merged by the last program to finish one; many by a second launch, with a
program for each head."""

import triton
import triton.language as tl

from dsv4.ops.attention.tiles_triton import BT, LOG2E, piece_first, piece_width
from dsv4.ops.device import interpreting, launch_options, start_dependents
from dsv4.ops.kv.entry_triton import append, rope_tile

AHEAD = tl.constexpr(8)  # tiles that are read together
FEW_TILES = 4  # up to here the last program merges


@triton.jit
def finish_piece(
    acc, scale, out, q_at, live, position, frequencies, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    BH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of weights, rotate back where channels are rotated, store."""
    x = (acc * scale[:, None]).to(out.dtype.element_ty)
    if FIRST >= DIM - ROPE:
        table = frequencies + (FIRST - (DIM - ROPE)) // 2
        x = rope_tile(x.to(tl.float32), position, table, -1.0, BH, 0, WIDTH, WIDTH)
    channel = FIRST + tl.arange(0, WIDTH)
    tl.store(out + q_at + channel[None, :], x.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def merge_here(
    sums, stats, sink, out, q_at, row, head, live, position, frequencies, num_tiles, num_tokens,
    num_heads, COUNT: tl.constexpr, BH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """All tiles of a query and a block of heads; other programs wrote them."""
    sunk = tl.load(sink + head, mask=live, other=0.0).to(tl.float32) * LOG2E
    for i in tl.static_range(COUNT):
        channel = piece_first(DIM, ROPE, i) + tl.arange(0, piece_width(DIM, ROPE, i))[None, :]
        zero = tl.zeros((BH, piece_width(DIM, ROPE, i)), tl.float32)
        best = sunk
        total = tl.full((BH,), 1.0, tl.float32)
        acc = zero
        for tile in tl.range(0, num_tiles):
            at = (tile * num_tokens + row) * num_heads + head
            top = tl.load(stats + at * 2, mask=live, other=0.0, cache_modifier=".cg")
            part = tl.load(stats + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
            piece = sums + at[:, None] * DIM + channel
            piece = tl.load(piece, mask=live[:, None], other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, top)
            old_share = tl.exp2(best - new_best)
            new_share = tl.exp2(top - new_best)
            total = tl.fma(part, new_share, total * old_share)
            acc = tl.fma(piece, new_share[:, None] + zero, acc * old_share[:, None])
            best = new_best
        finish_piece(
            acc, 1.0 / total, out, q_at, live, position, frequencies, piece_first(DIM, ROPE, i),
            piece_width(DIM, ROPE, i), BH, DIM, ROPE,
        )  # fmt: skip


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
    for first in tl.range(0, num_tiles, AHEAD):
        tops = ()
        parts = ()
        found = ()
        for i in tl.static_range(AHEAD):  # in flight together; a tile too many changes nothing
            there = first + i < num_tiles
            at = ((first + i) * num_tokens + row) * num_heads + head
            tops = append(tops, tl.load(stats + at * 2, mask=there, other=float("-inf")))
            parts = append(parts, tl.load(stats + at * 2 + 1, mask=there, other=0.0))
            found = append(found, tl.load(sums + at * DIM + channel, mask=live & there, other=0.0))
        for i in tl.static_range(AHEAD):
            new_best = tl.maximum(best, tops[i])
            old_share = tl.exp2(best - new_best)
            new_share = tl.exp2(tops[i] - new_best)
            total = tl.fma(parts[i], new_share, total * old_share)
            acc = tl.fma(found[i], new_share, acc * old_share)
            best = new_best
    x = (acc * (1.0 / total)).to(out.dtype.element_ty).to(tl.float32)[None, :]
    x = rope_tile(x, position, frequencies, -1.0, 1, DIM - ROPE, DIM, PAD)
    at = (row * num_heads + head) * DIM + channel[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=live[None, :])


def merge_tiles(
    q, sink, out, sums, stats, positions, frequencies, window, most, ratio, tile=BT
) -> None:
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
        BT=tile,
        WT=triton.cdiv(window, tile),
        ASM=not interpreting(),
        **launch_options(max(1, min(4, triton.next_power_of_2(dim) // 128))),
    )
