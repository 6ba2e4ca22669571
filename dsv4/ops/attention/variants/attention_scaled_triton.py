# mypy: ignore-errors
"""`attention` with FP8 scores (sm_100): cached keys go to the tensor core as stored.

A program rounds its queries once, in registers, to MXFP8; the keys' codes and their scales per 64
channels, each used for two groups of 32, are the other operand of a block-scaled product. Rotary
channels are multiplied in 16 bits and added. As values, entries are converted in registers: their
scale varies along the entries, the reduction axis, so no product can apply it.

Keys use the tensor core's M slot, so scores and sums are `[entries, heads]` and `[channels,
heads]`. Tiles have BT entries; otherwise a query's list, its tiles and their merging are as in
attention_triton.py: with few queries each tile has a program, with many a program loops over them.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import attention_triton
from dsv4.ops.attention.attention_triton import AttentionVariant
from dsv4.ops.attention.tile_device import (
    LOG2E,
    add_tile,
    finish_piece,
    load_piece,
    most_entries,
    piece_first,
    pieces,
    pool_of,
    ratio_of,
    tile_format,
    tile_places,
    tile_slots,
)
from dsv4.ops.attention.variants.merge_triton import merge_tiles
from dsv4.ops.core.helpers_device import append
from dsv4.ops.core.launch import launch_options, native_keys_reason
from dsv4.ops.core.workspace import workspace
from dsv4.ops.kv.entry_device import FP8, fp8_groups, pool_format, scale_byte

BT = 128  # entries per tile, the rows of the tensor core's M slot; changing it changes bits
HEADS = 16  # per program; sums of 32 heads spill
FEW, TYPICAL = 600, 16  # up to FEW programs each takes a tile; TYPICAL: tiles assumed per query
CHUNK = tl.constexpr(128)  # channels per block-scaled product: two scales of a key


@triton.jit
def _query_chunk(q, q_at, live, FIRST: tl.constexpr, NOPE: tl.constexpr, BH: tl.constexpr):
    """MXFP8 of channels FIRST on: codes `[CHUNK, BH]`, scale bytes `[BH, CHUNK / 32]`."""
    channel = FIRST + tl.arange(0, CHUNK)[None, :]
    x = tl.load(q + q_at + channel, mask=live[:, None] & (channel < NOPE), other=0.0)
    groups = x.to(tl.float32).reshape(BH * CHUNK // 32, 32)
    codes, exponent = fp8_groups(groups, tl.arange(0, 32)[None, :] >= 0)
    scales = scale_byte(exponent).to(tl.uint8).reshape(BH, CHUNK // 32)
    return tl.trans(codes.reshape(BH, CHUNK)), scales


@triton.jit
def _scores(codes, q_scales, rotary, pool, scales, slot, BH: tl.constexpr, T: tl.constexpr):
    """fp32 `[bt, BH]`; `scales`: the scale bytes of each entry."""
    tail = load_piece(pool, scales, slot, T.nope, T.dim - T.nope, T)
    ENTRIES: tl.constexpr = T.bt
    scores = tl.zeros((ENTRIES, BH), tl.float32)
    for i in tl.static_range(len(codes)):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        k = tl.load(pool.data + slot[:, None] * T.nope + channel, mask=channel < T.nope, other=0)
        place = 8 * (i * CHUNK // 64 + tl.arange(0, CHUNK // 32) // 2)
        k_scales = ((scales[:, None] >> place[None, :]) & 255).to(tl.uint8)
        k = k.to(tl.float8e4nv, bitcast=True)
        scores = tl.dot_scaled(k, k_scales, "e4m3", codes[i], q_scales[i], "e4m3", scores)
    return tl.dot(tail, rotary, scores)


@triton.jit
def _tile_weights(
    codes, q_scales, rotary, pool, scales, slot, present, qk_scale, BH: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile: weights `[bt, BH]`, their sum `[BH]`, maximum."""
    scores = _scores(codes, q_scales, rotary, pool, scales, slot, BH, T)
    scores = tl.where(present[:, None], scores * qk_scale, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=0), -1e30)
    weights = tl.exp2(scores - top[None, :]).to(T.mt)
    ENTRIES: tl.constexpr = T.bt
    ones = tl.full((64, ENTRIES), 1.0, T.mt)
    total = tl.max(tl.dot(ones, weights, tl.zeros((64, BH), tl.float32)), axis=0)  # all equal
    return weights, total, top


@triton.jit
def _piece_sum(weights, pool, scales, slot, PIECE: tl.constexpr, BH: tl.constexpr, T: tl.constexpr):
    """fp32 `[channels, BH]`: a piece of the entries, as values, times the weights."""
    FIRST: tl.constexpr = piece_first(T.dim, T.rope, PIECE)
    WIDTH: tl.constexpr = pieces(T.dim, T.rope)[PIECE]
    value = load_piece(pool, scales, slot, FIRST, WIDTH, T)
    return tl.dot(tl.trans(value), weights, tl.zeros((WIDTH, BH), tl.float32))


@triton.jit(do_not_specialize=["num_tokens", "num_selected", "w_width", "c_width"])
def _scaled_kernel(
    q, sink, out, acc_out, stat_out, at, num_selected, w_width, c_width, frequencies, num_heads,
    num_tokens, window, ratio, qk_scale, CHUNKS: tl.constexpr, COUNT: tl.constexpr,
    SPLIT: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A block of heads, a token and, if SPLIT, a tile."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    head = block * BH + tl.arange(0, BH)
    live = head < num_heads
    position = tl.load(at.positions + row).to(tl.int32)
    seq = tl.load(at.seq_idx + row).to(tl.int64)
    visible = tl.minimum((position + 1) // ratio, num_selected)
    tiles = T.wt + tl.cdiv(visible, T.bt)
    if tile >= tiles:
        return
    q_at = (row * num_heads + head)[:, None] * T.dim
    codes = ()
    q_scales = ()
    for i in tl.static_range(CHUNKS):
        code, scale = _query_chunk(q, q_at, live, i * CHUNK, T.nope, BH)
        codes = append(codes, code)
        q_scales = append(q_scales, scale)
    channel = T.nope + tl.arange(0, T.rope)
    rotary = tl.load(q + q_at + channel[None, :], mask=live[:, None], other=0.0)
    rotary = tl.trans(rotary.to(T.mt))
    if SPLIT:
        slot, present = tile_slots(
            tile, position, visible, seq, row, window, at, num_selected, w_width, c_width, T
        )
        pool = pool_of(tile < T.wt, at)
        scales = tl.load(pool.scale + slot)
        weights, part, top = _tile_weights(
            codes, q_scales, rotary, pool, scales, slot, present, qk_scale, BH, T
        )
        to = (tile.to(tl.int64) * num_tokens + row) * num_heads + head
        tl.store(stat_out + to * 2, top, mask=live)
        tl.store(stat_out + to * 2 + 1, part, mask=live)
        for i in tl.static_range(COUNT):
            channel = piece_first(T.dim, T.rope, i) + tl.arange(0, pieces(T.dim, T.rope)[i])
            acc = _piece_sum(weights, pool, scales, slot, i, BH, T)
            acc_at = to[:, None] * T.dim + channel[None, :]
            tl.store(acc_out + acc_at, tl.trans(acc), mask=live[:, None])
    else:
        best = tl.load(sink + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((BH,), 1.0, tl.float32)
        sums = ()
        for i in tl.static_range(COUNT):
            sums = append(sums, tl.zeros((pieces(T.dim, T.rope)[i], BH), tl.float32))
        for step in tl.range(0, tiles, num_stages=STAGES):
            slot, present = tile_slots(
                step, position, visible, seq, row, window, at, num_selected, w_width, c_width, T
            )
            pool = pool_of(step < T.wt, at)
            scales = tl.load(pool.scale + slot)
            weights, part, top = _tile_weights(
                codes, q_scales, rotary, pool, scales, slot, present, qk_scale, BH, T
            )
            best, total, old_share, new_share = add_tile(best, total, top, part)
            grown = ()
            for i in tl.static_range(COUNT):
                acc = _piece_sum(weights, pool, scales, slot, i, BH, T)
                before = sums[i] * old_share[None, :]
                grown = append(
                    grown, tl.fma(acc, new_share[None, :].broadcast_to(acc.shape), before)
                )
            sums = grown
        scale = 1.0 / total
        for i in tl.static_range(COUNT):
            finish_piece(
                tl.trans(sums[i]), scale, out, q_at, live, position, frequencies,
                piece_first(T.dim, T.rope, i), BH, T,
            )  # fmt: skip


def choose_config(num_tokens: int, num_heads: int, num_tiles: int) -> AttentionVariant:
    """Running tiles in parallel changes no bit; the head count never depends on the batch."""
    split = num_tokens * triton.cdiv(num_heads, HEADS) * min(num_tiles, TYPICAL) <= FEW
    return AttentionVariant(HEADS, split, 8, 2)


def supports(q, to) -> str | None:
    if to.pool.activations != "a8":
        return "no pool asks for rounded queries"
    rope_dim = 2 * to.frequencies.shape[0]
    if q.dtype != torch.bfloat16 or pool_format(to.pool) != FP8:
        return f"{q.dtype} queries and {to.pool.format} keys, expected bfloat16 and fp8"
    if rope_dim & (rope_dim - 1) or rope_dim > 64:
        return f"{rope_dim} rotated channels, expected a power of two up to 64"
    return native_keys_reason(q.device) or attention_triton.layout_reason(q, to)


def run(q, to, config=None):
    tokens, heads, dim = q.shape
    num_tiles = triton.cdiv(to.window, BT) + triton.cdiv(most_entries(to.compressed), BT)
    config = config or choose_config(tokens, heads, num_tiles)
    rope_dim, out = 2 * to.frequencies.shape[0], torch.empty_like(q)
    room = num_tiles * tokens * heads if config.split else 1
    acc = workspace(q.device, "attention_sums", room * dim, torch.float32)
    stats = workspace(q.device, "attention_stats", 2 * room, torch.float32)
    places, counts = tile_places(to)
    grid = (triton.cdiv(heads, config.heads), tokens, num_tiles if config.split else 1)
    _scaled_kernel[grid](
        q, to.sink, out, acc, stats, places, *counts, to.frequencies, heads, tokens, to.window,
        ratio_of(to), dim**-0.5 * LOG2E.value, CHUNKS=triton.cdiv(dim - rope_dim, CHUNK.value),
        COUNT=len(pieces(dim, rope_dim)), SPLIT=config.split, BH=config.heads,
        STAGES=config.num_stages, T=tile_format(q, to, BT), **launch_options(config.num_warps),
    )  # fmt: skip
    if config.split:
        merge_tiles(q, to, out, acc, stats, tile=BT)
    return out
