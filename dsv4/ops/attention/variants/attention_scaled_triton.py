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
    entry_parts,
    finish_piece,
    load_piece,
    most_entries,
    piece_first,
    piece_width,
    pieces,
    tile_slots,
)
from dsv4.ops.attention.variants.merge_triton import merge_tiles
from dsv4.ops.core.helpers_device import append
from dsv4.ops.core.launch import launch_options, native_reason
from dsv4.ops.core.workspace import workspace
from dsv4.ops.kv.entry_device import FP8, fp8_groups, pool_format, scale_byte

BT = 128  # entries per tile, the rows of the tensor core's M slot; changing it changes bits
HEADS = 16  # per program; sums of 32 heads spill
FEW, TYPICAL = 600, 16  # up to FEW programs each takes a tile; TYPICAL: tiles assumed per query
CHUNK = tl.constexpr(128)  # channels per block-scaled product: two scales of a key
MT = tl.float16  # of rotary channels, weights and values


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
def _scores(
    codes, q_scales, rotary, data, scales, slot, tail, BH: tl.constexpr, BT: tl.constexpr,
    NOPE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """fp32 `[BT, BH]`; `scales`: the scale bytes of each entry, `tail`: its rotary channels."""
    scores = tl.zeros((BT, BH), tl.float32)
    for i in tl.static_range(CHUNKS):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        k = tl.load(data + slot[:, None] * NOPE + channel, mask=channel < NOPE, other=0)
        place = 8 * (i * CHUNK // 64 + tl.arange(0, CHUNK // 32) // 2)
        k_scales = ((scales[:, None] >> place[None, :]) & 255).to(tl.uint8)
        k = k.to(tl.float8e4nv, bitcast=True)
        scores = tl.dot_scaled(k, k_scales, "e4m3", codes[i], q_scales[i], "e4m3", scores)
    return tl.dot(tail, rotary, scores)


@triton.jit
def _tile_weights(
    codes, q_scales, rotary, slot, present, in_window, w_data, w_tail, w_scale, c_data, c_tail,
    c_scale, qk_scale, NOPE: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile: addresses of its entries (data, tail, scales), weights `[BT, BH]`, their
    sum `[BH]`, maximum."""
    data = tl.where(in_window, w_data, c_data)
    tail = tl.where(in_window, w_tail, c_tail)
    scales = tl.load(tl.where(in_window, w_scale, c_scale) + slot)
    rotated = load_piece(data, tail, scales, slot, NOPE, DIM - NOPE, 2, NOPE, DIM, MT, False)
    scores = _scores(codes, q_scales, rotary, data, scales, slot, rotated, BH, BT, NOPE, CHUNKS)
    scores = tl.where(present[:, None], scores * qk_scale, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=0), -1e30)
    weights = tl.exp2(scores - top[None, :]).to(MT)
    ones = tl.full((64, BT), 1.0, MT)
    total = tl.max(tl.dot(ones, weights, tl.zeros((64, BH), tl.float32)), axis=0)  # all equal
    return data, tail, scales, weights, total, top


@triton.jit
def _piece_sum(
    weights, data, tail, scales, slot, PIECE: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    BH: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """fp32 `[channels, BH]`: a piece of the entries, as values, times the weights."""
    FIRST: tl.constexpr = piece_first(DIM, DIM - NOPE, PIECE)
    WIDTH: tl.constexpr = piece_width(DIM, DIM - NOPE, PIECE)
    value = load_piece(data, tail, scales, slot, FIRST, WIDTH, 2, NOPE, DIM, MT, False)
    return tl.dot(tl.trans(value), weights, tl.zeros((WIDTH, BH), tl.float32))


@triton.jit(do_not_specialize=["num_tokens", "num_selected", "w_width", "c_width"])
def _scaled_kernel(
    q, sink, out, acc_out, stat_out, positions, seq_idx, selected, num_selected,
    w_data, w_tail, w_scale, w_table, w_width, c_data, c_tail, c_scale, c_table, c_width,
    frequencies, num_heads, num_tokens, window, ratio, qk_scale,
    NOPE: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr, COUNT: tl.constexpr,
    SPLIT: tl.constexpr, SELECTED: tl.constexpr, BH: tl.constexpr,
    BT: tl.constexpr, WT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr,
    STAGES: tl.constexpr, MT: tl.constexpr
):  # fmt: skip
    """A block of heads, a token and, if SPLIT, a tile."""
    ROPE: tl.constexpr = DIM - NOPE
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    head = block * BH + tl.arange(0, BH)
    live = head < num_heads
    position = tl.load(positions + row).to(tl.int32)
    seq = tl.load(seq_idx + row).to(tl.int64)
    visible = tl.minimum((position + 1) // ratio, num_selected)
    tiles = WT + tl.cdiv(visible, BT)
    if tile >= tiles:
        return
    q_at = (row * num_heads + head)[:, None] * DIM
    codes = ()
    q_scales = ()
    for i in tl.static_range(CHUNKS):
        code, scale = _query_chunk(q, q_at, live, i * CHUNK, NOPE, BH)
        codes = append(codes, code)
        q_scales = append(q_scales, scale)
    channel = NOPE + tl.arange(0, ROPE)
    rotary = tl.load(q + q_at + channel[None, :], mask=live[:, None], other=0.0)
    rotary = tl.trans(rotary.to(MT))
    if SPLIT:
        slot, present = tile_slots(
            tile, position, visible, seq, row, window, selected, num_selected,
            w_table, w_width, c_table, c_width, WT, BT, W_ENTRIES, C_ENTRIES, SELECTED,
        )  # fmt: skip
        data, tail, scales, weights, part, top = _tile_weights(
            codes, q_scales, rotary, slot, present, tile < WT, w_data, w_tail, w_scale,
            c_data, c_tail, c_scale, qk_scale, NOPE, DIM, CHUNKS, BH, BT, MT,
        )  # fmt: skip
        at = (tile.to(tl.int64) * num_tokens + row) * num_heads + head
        tl.store(stat_out + at * 2, top, mask=live)
        tl.store(stat_out + at * 2 + 1, part, mask=live)
        for i in tl.static_range(COUNT):
            channel = piece_first(DIM, ROPE, i) + tl.arange(0, piece_width(DIM, ROPE, i))
            acc = _piece_sum(weights, data, tail, scales, slot, i, NOPE, DIM, BH, MT)
            acc_at = at[:, None] * DIM + channel[None, :]
            tl.store(acc_out + acc_at, tl.trans(acc), mask=live[:, None])
    else:
        best = tl.load(sink + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((BH,), 1.0, tl.float32)
        sums = ()
        for i in tl.static_range(COUNT):
            sums = append(sums, tl.zeros((piece_width(DIM, ROPE, i), BH), tl.float32))
        for step in tl.range(0, tiles, num_stages=STAGES):
            slot, present = tile_slots(
                step, position, visible, seq, row, window, selected, num_selected,
                w_table, w_width, c_table, c_width, WT, BT, W_ENTRIES, C_ENTRIES, SELECTED,
            )  # fmt: skip
            data, tail, scales, weights, part, top = _tile_weights(
                codes, q_scales, rotary, slot, present, step < WT, w_data, w_tail, w_scale,
                c_data, c_tail, c_scale, qk_scale, NOPE, DIM, CHUNKS, BH, BT, MT,
            )  # fmt: skip
            best, total, old_share, new_share = add_tile(best, total, top, part)
            grown = ()
            for i in tl.static_range(COUNT):
                acc = _piece_sum(weights, data, tail, scales, slot, i, NOPE, DIM, BH, MT)
                before = sums[i] * old_share[None, :]
                grown = append(
                    grown, tl.fma(acc, new_share[None, :].broadcast_to(acc.shape), before)
                )
            sums = grown
        scale = 1.0 / total
        for i in tl.static_range(COUNT):
            finish_piece(
                tl.trans(sums[i]), scale, out, q_at, live, position, frequencies,
                piece_first(DIM, ROPE, i), piece_width(DIM, ROPE, i), BH, DIM, ROPE,
            )  # fmt: skip


def choose_config(num_tokens: int, num_heads: int, num_tiles: int) -> AttentionVariant:
    """Running tiles in parallel changes no bit; the head count never depends on the batch."""
    split = num_tokens * triton.cdiv(num_heads, HEADS) * min(num_tiles, TYPICAL) <= FEW
    return AttentionVariant(HEADS, split, 8, 2)


def supports(q, sink, pool, table, compressed, batch, window, frequencies) -> str | None:
    if pool.activations != "a8":
        return "no pool asks for rounded queries"
    rope_dim = 2 * frequencies.shape[0]
    if q.dtype != torch.bfloat16 or pool_format(pool) != FP8:
        return f"{q.dtype} queries and {pool.format} keys, expected bfloat16 and fp8"
    if rope_dim & (rope_dim - 1) or rope_dim > 64:
        return f"{rope_dim} rotated channels, expected a power of two up to 64"
    return native_reason(q.device) or attention_triton.layout_reason(
        q, sink, pool, table, compressed, batch, window, frequencies
    )


def run(q, sink, pool, table, compressed, batch, window, frequencies, config=None):
    tokens, heads, dim = q.shape
    other = pool if compressed is None else compressed.pool
    other_table = table if compressed is None else compressed.table
    selected = None if compressed is None else compressed.selected
    ratio = 1 if compressed is None else compressed.ratio
    most = most_entries(compressed)
    num_tiles = triton.cdiv(window, BT) + triton.cdiv(most, BT)
    config = config or choose_config(tokens, heads, num_tiles)
    rope_dim, out = 2 * frequencies.shape[0], torch.empty_like(q)
    blocks = triton.cdiv(heads, config.heads)
    room = num_tiles * tokens * heads if config.split else 1
    acc = workspace(q.device, "attention_sums", room * dim, torch.float32)
    stats = workspace(q.device, "attention_stats", 2 * room, torch.float32)
    _scaled_kernel[(blocks, tokens, num_tiles if config.split else 1)](
        q, sink, out, acc, stats, batch.positions, batch.seq_idx,
        batch.positions if selected is None else selected, most,
        *entry_parts(pool), table, table.shape[1],
        *entry_parts(other), other_table, other_table.shape[1],
        frequencies, heads, tokens, window, ratio, dim**-0.5 * LOG2E.value,
        NOPE=dim - rope_dim, DIM=dim, CHUNKS=triton.cdiv(dim - rope_dim, CHUNK.value),
        COUNT=len(pieces(dim, rope_dim)), SPLIT=config.split,
        SELECTED=selected is not None, BH=config.heads, BT=BT, WT=triton.cdiv(window, BT),
        W_ENTRIES=pool.page_entries, C_ENTRIES=other.page_entries,
        STAGES=config.num_stages, MT=MT, **launch_options(config.num_warps),
    )  # fmt: skip
    if config.split:
        merge_tiles(
            q, sink, out, acc, stats, batch.positions, frequencies, window, most, ratio, tile=BT
        )
    return out
