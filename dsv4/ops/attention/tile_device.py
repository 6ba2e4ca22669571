# mypy: ignore-errors
"""Device code for one attention tile: entry addresses, softmax, and merging with other tiles."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import append
from dsv4.ops.core.launch import interpreting
from dsv4.ops.kv.entry_device import (
    FP8,
    FP32,
    pool_constants,
    pool_format,
    pool_tensors,
    power_of_two,
)
from dsv4.ops.kv.rope_device import rope_tile

BT = 64  # entries per tile; changing it changes bits
LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def pieces(dim, rope_dim):
    """Widths of an entry's pieces: powers of two up to 64, the group of one scale; rotated
    channels are separate."""
    widths = []
    for left in (dim - rope_dim, rope_dim):
        while left:
            widths.append(min(64, 1 << (left.bit_length() - 1)))
            left -= widths[-1]
    return tuple(widths)


@triton.constexpr_function
def num_pieces(dim, rope_dim):
    return len(pieces(dim, rope_dim))


@triton.constexpr_function
def piece_width(dim, rope_dim, index):
    return pieces(dim, rope_dim)[index]


@triton.constexpr_function
def piece_first(dim, rope_dim, index):
    """First channel of piece `index` of an entry."""
    return sum(pieces(dim, rope_dim)[:index])


@triton.jit
def _times(k, factor, ASM: tl.constexpr):
    """`k * factor` in fp16. The opaque instruction hides the 8-bit type from the compiler, which
    then takes channels in 16-bit order, as it does for products of 64 heads."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [k, factor.broadcast_to(k.shape)],
            dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    return k * factor


@triton.jit
def to_half(x, MT: tl.constexpr, ASM: tl.constexpr):
    """`x` in MT; converted from bf16 to fp16 once before shared memory, not in every warp that
    reads it."""
    if ASM and x.dtype == tl.bfloat16 and tl.float16 == MT:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000;"
            " cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    return x.to(MT)


@triton.jit
def _fetch_piece(
    data, tail, slot, FIRST: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    NOPE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Channels FIRST to FIRST + WIDTH of the entries at `slot`, as stored."""
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    if FORMAT != 2:
        x = tl.load(data + slot[:, None] * DIM + channel)
    elif FIRST >= NOPE:
        x = tl.load(tail + slot[:, None] * (DIM - NOPE) + (channel - NOPE))
    else:
        x = tl.load(data + slot[:, None] * NOPE + channel)
    return x


@triton.jit
def widen_piece(
    x, scales, FIRST: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr, MT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The result of `_fetch_piece`, in MT.

    `scales` (int64): the scale bytes of each entry, the first group in the lowest byte.
    """
    if FORMAT == 2 and FIRST < NOPE:
        return widen_codes(x, scales, FIRST // 64, MT, ASM)
    else:
        return to_half(x, MT, ASM)


@triton.jit
def widen_codes(x, scales, group, MT: tl.constexpr, ASM: tl.constexpr):
    """FP8 bytes of one group of channels, scaled, in MT."""
    factor = power_of_two(((scales >> (8 * group)) & 255).to(tl.int32)).to(MT)[:, None]
    k = x.to(tl.float8e4nv, bitcast=True).to(MT)
    return _times(k, factor, ASM and tl.float16 == MT)


@triton.jit
def load_piece(
    data, tail, scales, slot, FIRST: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    NOPE: tl.constexpr, DIM: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    x = _fetch_piece(data, tail, slot, FIRST, WIDTH, FORMAT, NOPE, DIM)
    return widen_piece(x, scales, FIRST, FORMAT, NOPE, MT, ASM)


@triton.jit
def load_queries(q, q_at, live, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Queries by piece, as stored."""
    found = ()
    for i in tl.static_range(num_pieces(DIM, ROPE)):
        channel = piece_first(DIM, ROPE, i) + tl.arange(0, piece_width(DIM, ROPE, i))
        x = tl.load(q + q_at + channel[None, :], mask=live[:, None], other=0.0)
        found = append(found, x)
    return found


@triton.jit
def widen_queries(found, JOINED: tl.constexpr, MT: tl.constexpr):
    queries = ()
    for i in tl.static_range(len(found)):
        queries = append(queries, found[i].to(MT))
    return join_pieces(queries, JOINED)


@triton.jit
def fetch_tile(
    slot, in_window, w_data, w_tail, w_scale, c_data, c_tail, c_scale,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The entries at `slot` as stored, by piece, and their scale bytes."""
    data = tl.where(in_window, w_data, c_data)
    tail = tl.where(in_window, w_tail, c_tail)
    scales = slot
    if FORMAT == 2:
        scales = tl.load(tl.where(in_window, w_scale, c_scale) + slot)
    stored = ()
    for i in tl.static_range(num_pieces(DIM, ROPE)):
        x = _fetch_piece(
            data, tail, slot, piece_first(DIM, ROPE, i), piece_width(DIM, ROPE, i),
            FORMAT, NOPE, DIM,
        )  # fmt: skip
        stored = append(stored, x)
    return stored, scales


@triton.jit
def widen_tile(
    stored, scales, JOINED: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr,
    DIM: tl.constexpr, ROPE: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The result of `fetch_tile` in MT, with JOINED pieces per matrix."""
    keys = ()
    for i in tl.static_range(num_pieces(DIM, ROPE)):
        k = widen_piece(stored[i], scales, piece_first(DIM, ROPE, i), FORMAT, NOPE, MT, ASM)
        keys = append(keys, k)
    return join_pieces(keys, JOINED)


@triton.constexpr_function
def num_joined(dim, rope_dim, channels):
    """Pieces per matrix of `channels`; one if they do not fill such matrices."""
    widths = pieces(dim, rope_dim)
    count = channels // widths[0]
    fits = len(set(widths)) == 1 and count & (count - 1) == 0 and len(widths) % max(count, 1) == 0
    return count if fits and count > 0 else 1


@triton.constexpr_function
def chunk_width(dim, rope_dim, joined, index):
    """Width of `joined` concatenated pieces."""
    return joined * piece_width(dim, rope_dim, index * joined)


@triton.jit
def beside(a, b):
    """`[R, C]` and `[R, C]` -> `[R, 2 C]`, without moving data between threads."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def join_pieces(found, JOINED: tl.constexpr):
    """Concatenate each run of JOINED matrices."""
    if JOINED > 1:
        halves = ()
        for i in tl.static_range(0, len(found), 2):
            halves = append(halves, beside(found[i], found[i + 1]))
        return join_pieces(halves, JOINED // 2)
    else:
        return found


@triton.jit
def dot(a, b, acc, MT: tl.constexpr):
    if tl.float32 == MT:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def tile_choice(
    tile, visible, row, selected, num_selected, WT: tl.constexpr, BT: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """The compressed entries of a tile, -1 for none."""
    j = (tile - WT) * BT + tl.arange(0, BT)
    if SELECTED:
        live = (j >= 0) & (j < num_selected)
        older = tl.load(selected + row * num_selected + j, mask=live, other=-1).to(tl.int32)
    else:
        older = tl.where(j < visible, j, -1)
    return older


@triton.jit
def tile_pages(
    tile, older, position, seq, window, w_table, w_width, c_table, c_width,
    WT: tl.constexpr, BT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Pages of a tile's entries, their offsets inside, and a mask of those present.

    Masked slots read a valid dummy entry, so no NaN is loaded: the newest of the window, or the
    first compressed one.
    """
    in_window = tile < WT
    i = tile * BT + tl.arange(0, BT)
    recent = tl.where(i < window, position + 1 - window + i, -1)
    entry = tl.where(in_window, recent, older)
    present = entry >= 0
    entry = tl.where(present, entry, tl.where(in_window, position, 0))
    page = tl.where(in_window, entry // W_ENTRIES, entry // C_ENTRIES)
    inside = tl.where(in_window, entry % W_ENTRIES, entry % C_ENTRIES)
    width = tl.where(in_window, w_width, c_width)
    table = tl.where(in_window, w_table, c_table) + seq * width
    # the window's table is a ring; one division suffices, since entries span less than one turn
    oldest = tl.where(in_window, tl.maximum(position + 1 - window, 0) // W_ENTRIES, 0)
    place = page - oldest + oldest % width
    place = tl.where(place >= width, place - width, place)
    return tl.load(table + place), inside, present


@triton.jit
def slots_of(
    tile, page, inside, WT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr
):
    """Entry offsets (int64) from the pool's start, in entries."""
    return page.to(tl.int64) * tl.where(tile < WT, W_ENTRIES, C_ENTRIES) + inside


@triton.jit
def tile_slots(
    tile, position, visible, seq, row, window, selected, num_selected,
    w_table, w_width, c_table, c_width,
    WT: tl.constexpr, BT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile's entries, and a mask of those present."""
    older = tile_choice(tile, visible, row, selected, num_selected, WT, BT, SELECTED)
    page, inside, present = tile_pages(
        tile, older, position, seq, window, w_table, w_width, c_table, c_width,
        WT, BT, W_ENTRIES, C_ENTRIES,
    )  # fmt: skip
    return slots_of(tile, page, inside, WT, W_ENTRIES, C_ENTRIES), present


@triton.jit
def softmax(scores, present, qk_scale, MT: tl.constexpr):
    """Weights of a tile's entries, and the maximum."""
    scores = tl.where(present[None, :], scores * qk_scale, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=1), -1e30)
    return tl.exp2(scores - top[:, None]).to(MT), top


@triton.jit
def tile_weights(
    queries, keys, present, num_tokens, qk_scale, JOINED: tl.constexpr, BH: tl.constexpr,
    BT: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile: weights, their sum `[BH]`, maximum.

    With joined pieces, products are inside conditions that always hold: a compiler that sees a
    product's result multiplied again assigns rows to warpgroups, and 64 rows are one warpgroup's
    worth, so both would compute all scores.
    """
    scores = tl.zeros((BH, BT), tl.float32)
    weights = tl.zeros((BH, BT), MT)
    top = tl.zeros((BH,), tl.float32)
    for i in tl.static_range(len(keys)):
        if JOINED == 1:
            scores = dot(queries[i], tl.trans(keys[i]), scores, MT)
        elif num_tokens > i - 64:
            scores = dot(queries[i], tl.trans(keys[i]), scores, MT)
            if i == len(keys) - 1:
                weights, top = softmax(scores, present, qk_scale, MT)
    if JOINED == 1:
        weights, top = softmax(scores, present, qk_scale, MT)
    return weights, weights_sum(weights, BH, BT, MT), top


@triton.jit
def weights_sum(weights, BH: tl.constexpr, BT: tl.constexpr, MT: tl.constexpr):
    """The sum of weights as a product, so that its order is that of the values."""
    ones = tl.full((BT, 16), 1.0, MT)
    return tl.max(dot(weights, ones, tl.zeros((BH, 16), tl.float32), MT), axis=1)  # all equal


@triton.jit
def add_tile(best, total, top, part):
    """Maximum and sum of weights after one more tile, and the factors of the old sums and of the
    tile: every variant merges with this formula."""
    new_best = tl.maximum(best, top)
    old_share = tl.exp2(best - new_best)
    new_share = tl.exp2(top - new_best)
    return new_best, tl.fma(part, new_share, total * old_share), old_share, new_share


@triton.jit
def finish_piece(
    acc, scale, out, q_at, live, position, frequencies, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    BH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of weights, rotate the rotary channels back, store."""
    x = (acc * scale[:, None]).to(out.dtype.element_ty)
    if FIRST + WIDTH > DIM - ROPE:
        TURNED: tl.constexpr = max(DIM - ROPE - FIRST, 0)
        table = frequencies + max(FIRST - (DIM - ROPE), 0) // 2
        x = rope_tile(x.to(tl.float32), position, table, -1.0, BH, TURNED, WIDTH, WIDTH)
    channel = FIRST + tl.arange(0, WIDTH)
    tl.store(out + q_at + channel[None, :], x.to(out.dtype.element_ty), mask=live[:, None])


def is_narrow(q, pool) -> bool:
    return q.dtype == torch.bfloat16 and pool_format(pool) != FP32


def most_entries(compressed) -> int:
    """Most compressed entries that any query sees."""
    if compressed is None:
        return 0
    if compressed.selected is not None:
        return compressed.selected.shape[1]
    return compressed.table.shape[1] * compressed.pool.page_entries


def entry_parts(pool):
    """data, tail and the scale bytes of an entry as one integer."""
    data, tail, scale = pool_tensors(pool)
    return data, tail, scale.view(torch.int64) if pool_format(pool) == FP8 else data


def place_arguments(pool, table, compressed, batch) -> tuple:
    """Entry locations as kernel arguments: from `positions` to `c_width`."""
    other = pool if compressed is None else compressed.pool
    other_table = table if compressed is None else compressed.table
    selected = None if compressed is None else compressed.selected
    return (
        batch.positions, batch.seq_idx, batch.positions if selected is None else selected,
        most_entries(compressed), *entry_parts(pool), table, table.shape[1],
        *entry_parts(other), other_table, other_table.shape[1],
    )  # fmt: skip


def place_constants(q, pool, compressed, window, frequencies) -> dict[str, object]:
    constants = pool_constants(pool)
    narrow = tl.float16 if pool_format(pool) == FP8 else tl.bfloat16
    return {
        **{name: constants[name] for name in ("FORMAT", "NOPE", "DIM")},
        "ROPE": 2 * frequencies.shape[0],
        "RATIO": 1 if compressed is None else compressed.ratio,
        "SELECTED": compressed is not None and compressed.selected is not None,
        "BT": BT,
        "WT": triton.cdiv(window, BT),
        "W_ENTRIES": pool.page_entries,
        "C_ENTRIES": (pool if compressed is None else compressed.pool).page_entries,
        "MT": narrow if is_narrow(q, pool) else tl.float32,
        "ASM": not interpreting(),
    }
