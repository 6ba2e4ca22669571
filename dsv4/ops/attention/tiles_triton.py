# mypy: ignore-errors
"""What `attention` does with a tile: where its entries lie, its softmax; and how tiles that ran in
parallel become one result, in ascending order from the sink on, by a program for each head."""

import triton
import triton.language as tl

from dsv4.ops.device import launch_options
from dsv4.ops.kv.entry_triton import append, power_of_two, rope_tile

BT = 64  # entries of a tile; changing it changes bits
LOG2E = tl.constexpr(1.4426950408889634)
AHEAD = tl.constexpr(8)  # tiles that are merged together


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


@triton.jit
def _times(k, factor, ASM: tl.constexpr):
    """`k * factor` in fp16. The compiler sees no 8-bit number behind an opaque instruction and
    takes channels in the order of 16-bit ones, as it does for products of 64 heads."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [k, factor.broadcast_to(k.shape)],
            dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    return k * factor


@triton.jit
def load_piece(
    data, tail, scales, slot, FIRST: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    NOPE: tl.constexpr, DIM: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Channels FIRST to FIRST + WIDTH of the entries at `slot`, in MT.

    `scales` (int64): the scale bytes of each entry, the first group in the lowest byte.
    """
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    if FORMAT != 2:
        k = tl.load(data + slot[:, None] * DIM + channel).to(MT)
    elif FIRST >= NOPE:
        k = tl.load(tail + slot[:, None] * (DIM - NOPE) + (channel - NOPE)).to(MT)
    else:
        code = tl.load(data + slot[:, None] * NOPE + channel)
        GROUP: tl.constexpr = FIRST // 64
        factor = power_of_two(((scales >> (8 * GROUP)) & 255).to(tl.int32)).to(MT)[:, None]
        k = code.to(tl.float8e4nv, bitcast=True).to(MT)
        k = _times(k, factor, ASM and tl.float16 == MT)
    return k


@triton.jit
def dot(a, b, acc, MT: tl.constexpr):
    if tl.float32 == MT:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def tile_slots(
    tile, position, visible, seq, row, window, selected, num_selected,
    w_table, w_width, c_table, c_width,
    WT: tl.constexpr, BT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr,
    SELECTED: tl.constexpr,
):  # fmt: skip
    """Where the entries of a tile lie (int64) and which are present.

    In place of an absent one stands another that exists, so that nothing but numbers is read: the
    newest of the window, the first that was compressed.
    """
    in_window = tile < WT
    i = tile * BT + tl.arange(0, BT)
    recent = tl.where(i < window, position + 1 - window + i, -1)
    j = i - WT * BT
    if SELECTED:
        live = (j >= 0) & (j < num_selected)
        older = tl.load(selected + row * num_selected + j, mask=live, other=-1).to(tl.int32)
    else:
        older = tl.where(j < visible, j, -1)
    entry = tl.where(in_window, recent, older)
    present = entry >= 0
    entry = tl.where(present, entry, tl.where(in_window, position, 0))
    page = tl.where(in_window, entry // W_ENTRIES, entry // C_ENTRIES)
    inside = tl.where(in_window, entry % W_ENTRIES, entry % C_ENTRIES)
    width = tl.where(in_window, w_width, c_width)
    table = tl.where(in_window, w_table, c_table) + seq * width
    # the window's table is a ring; one division for all entries, they span less than a turn
    oldest = tl.where(in_window, tl.maximum(position + 1 - window, 0) // W_ENTRIES, 0)
    place = page - oldest + oldest % width
    place = tl.where(place >= width, place - width, place)
    page = tl.load(table + place).to(tl.int64)
    return page * tl.where(in_window, W_ENTRIES, C_ENTRIES) + inside, present


@triton.jit
def tile_weights(
    queries, slot, present, in_window, w_data, w_tail, w_scale, c_data, c_tail, c_scale, qk_scale,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    COUNT: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile: its entries by piece, weights, their sum `[BH]`, maximum."""
    data = tl.where(in_window, w_data, c_data)
    tail = tl.where(in_window, w_tail, c_tail)
    scales = slot
    if FORMAT == 2:
        scales = tl.load(tl.where(in_window, w_scale, c_scale) + slot)
    keys = ()
    for i in tl.static_range(COUNT):  # all before the first product: one wait for shared memory
        k = load_piece(
            data, tail, scales, slot, piece_first(DIM, ROPE, i), piece_width(DIM, ROPE, i),
            FORMAT, NOPE, DIM, MT, ASM and BH == 16,
        )  # fmt: skip
        keys = append(keys, k)
    scores = tl.zeros((BH, BT), tl.float32)
    for i in tl.static_range(COUNT):
        scores = dot(queries[i], tl.trans(keys[i]), scores, MT)
    scores = tl.where(present[None, :], scores * qk_scale, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=1), -1e30)
    weights = tl.exp2(scores - top[:, None]).to(MT)
    ones = tl.full((BT, 16), 1.0, MT)
    total = tl.max(dot(weights, ones, tl.zeros((BH, 16), tl.float32), MT), axis=1)  # all equal
    return keys, weights, total, top


@triton.jit
def add_tile(best, total, top, part):
    """The maximum and the sum of weights with one more tile, and the shares of what was there and
    of the tile: every form merges by this formula."""
    new_best = tl.maximum(best, top)
    old_share = tl.exp2(best - new_best)
    new_share = tl.exp2(top - new_best)
    return new_best, tl.fma(part, new_share, total * old_share), old_share, new_share


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


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _merge_kernel(
    sums, stats, sink, out, positions, frequencies, num_tokens, num_heads, most, ratio,
    DIM: tl.constexpr, PAD: tl.constexpr, ROPE: tl.constexpr, BT: tl.constexpr,
    WT: tl.constexpr
):  # fmt: skip
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
            best, total, old_share, new_share = add_tile(best, total, tops[i], parts[i])
            acc = tl.fma(found[i], new_share, acc * old_share)
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
        **launch_options(max(1, min(4, triton.next_power_of_2(dim) // 128))),
    )
