# mypy: ignore-errors
"""Device code of `attention`: where the entries of a tile lie, and the softmax of one tile."""

import triton
import triton.language as tl

from dsv4.ops.kv.entry_triton import append, power_of_two

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


@triton.jit
def load_piece(
    data, tail, scales, slot, FIRST: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    NOPE: tl.constexpr, DIM: tl.constexpr, MT: tl.constexpr,
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
        k = code.to(tl.float8e4nv, bitcast=True).to(MT) * factor
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
    COUNT: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, MT: tl.constexpr,
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
            FORMAT, NOPE, DIM, MT,
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
