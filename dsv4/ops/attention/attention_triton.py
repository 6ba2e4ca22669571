# mypy: ignore-errors
"""`attention` on a GPU: all heads of a block against tiles of BT gathered entries.

A query's list of entries is its window, oldest first, then its compressed entries, ascending, cut
by index into tiles. Each tile has its own softmax; tiles are merged in ascending order, starting
from the sink. With few queries each tile has a program and a second launch merges, with more a
launch makes all weights and another walks values (`decode/`), with many a program walks a query's
tiles (here). Same sums, same bits. Sums over entries are matrix products (the softmax denominator
too), so no result depends on how a tile is laid out over threads. Channels are multiplied in
ascending order, however many stand in one matrix.

A walking program has two tiles of entries on the way to shared memory, the pages of the tile after
them and the choice of the next, and loads its next queries before it stores a result. Names that a
loop hands on twice unchanged (`a = b; b = c`) would switch that off: the compiler then loads
everything where it is used.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.decode import passes_triton, tile_triton
from dsv4.ops.attention.decode.merge_triton import tiles_ahead
from dsv4.ops.attention.tiles_triton import (
    BT,
    LOG2E,
    add_tile,
    chunk_width,
    dot,
    fetch_tile,
    finish_piece,
    is_narrow,
    load_queries,
    most_entries,
    num_joined,
    num_pieces,
    piece_first,
    pieces,
    place_arguments,
    place_constants,
    slots_of,
    tile_choice,
    tile_pages,
    tile_slots,
    tile_weights,
    widen_queries,
    widen_tile,
)
from dsv4.ops.device import device_reason, interpreting, launch_options
from dsv4.ops.kv.entry_triton import FP8, append, index_tensors_reason, pool_format, pool_reason


@triton.jit
def _queries_of(item, q, num_heads, BH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr):
    blocks = tl.cdiv(num_heads, BH)
    row = (item // blocks).to(tl.int64)
    head = (item % blocks) * BH + tl.arange(0, BH)
    q_at = (row * num_heads + head)[:, None] * DIM
    return load_queries(q, q_at, head < num_heads, DIM, ROPE)


@triton.jit(do_not_specialize=["num_tokens", "num_items", "num_selected", "w_width", "c_width"])
def _attend_kernel(
    q, sink, out, positions, seq_idx, selected, num_selected,
    w_data, w_tail, w_scale, w_table, w_width, c_data, c_tail, c_scale, c_table, c_width,
    frequencies, num_heads, num_tokens, num_items, window, qk_scale,
    RATIO: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, JOINED: tl.constexpr, SELECTED: tl.constexpr, BH: tl.constexpr,
    BT: tl.constexpr, WT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr,
    MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Items are (token, block of heads), the last fastest."""
    blocks = tl.cdiv(num_heads, BH)
    COUNT: tl.constexpr = num_pieces(DIM, ROPE) // JOINED
    found = _queries_of(tl.program_id(0), q, num_heads, BH, DIM, ROPE)
    queries = widen_queries(found, JOINED, MT)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64)
        head = (item % blocks) * BH + tl.arange(0, BH)
        live = head < num_heads
        q_at = (row * num_heads + head)[:, None] * DIM
        position = tl.load(positions + row).to(tl.int32)
        seq = tl.load(seq_idx + row).to(tl.int64)
        visible = tl.minimum((position + 1) // RATIO, num_selected)
        tiles = WT + tl.cdiv(visible, BT)
        best = tl.load(sink + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((BH,), 1.0, tl.float32)
        sums = ()
        for i in tl.static_range(COUNT):
            zero = tl.zeros((BH, chunk_width(DIM, ROPE, JOINED, i)), tl.float32)
            sums = append(sums, zero)
        slot, present = tile_slots(
            0, position, visible, seq, row, window, selected, num_selected,
            w_table, w_width, c_table, c_width, WT, BT, W_ENTRIES, C_ENTRIES, SELECTED,
        )  # fmt: skip
        # pages of the next tile and the choice of the one after are on the way
        older = tile_choice(1, visible, row, selected, num_selected, WT, BT, SELECTED)
        page, inside, next_present = tile_pages(
            1, older, position, seq, window, w_table, w_width, c_table, c_width,
            WT, BT, W_ENTRIES, C_ENTRIES,
        )  # fmt: skip
        older = tile_choice(2, visible, row, selected, num_selected, WT, BT, SELECTED)
        for step in tl.range(0, tiles):
            stored, scales = fetch_tile(
                slot, step < WT, w_data, w_tail, w_scale, c_data, c_tail, c_scale,
                FORMAT, NOPE, DIM, ROPE,
            )  # fmt: skip
            slot = slots_of(step + 1, page, inside, WT, W_ENTRIES, C_ENTRIES)
            page, inside, later_present = tile_pages(
                step + 2, older, position, seq, window, w_table, w_width,
                c_table, c_width, WT, BT, W_ENTRIES, C_ENTRIES,
            )  # fmt: skip
            older = tile_choice(step + 3, visible, row, selected, num_selected, WT, BT, SELECTED)
            keys = widen_tile(stored, scales, JOINED, FORMAT, NOPE, DIM, ROPE, MT, ASM and BH == 16)
            weights, part, top = tile_weights(
                queries, keys, present, num_tokens, qk_scale, JOINED, BH, BT, MT
            )
            best, total, old_share, new_share = add_tile(best, total, top, part)
            grown = ()
            for i in tl.static_range(COUNT):
                zero = tl.zeros((BH, chunk_width(DIM, ROPE, JOINED, i)), tl.float32)
                acc = dot(weights, keys[i], zero, MT)
                before = sums[i] * old_share[:, None]
                grown = append(grown, tl.fma(acc, new_share[:, None] + zero, before))
            sums = grown
            present = next_present & (step + 1 < tiles)
            next_present = later_present
        following = tl.minimum(item + tl.num_programs(0), num_items - 1)
        found = _queries_of(following, q, num_heads, BH, DIM, ROPE)
        scale = 1.0 / total
        for i in tl.static_range(COUNT):
            finish_piece(
                sums[i], scale, out, q_at, live, position, frequencies,
                piece_first(DIM, ROPE, i * JOINED), chunk_width(DIM, ROPE, JOINED, i),
                BH, DIM, ROPE,
            )  # fmt: skip
        # handed on by the loop: the compiler keeps only such ones, or loaded as they are,
        # in shared memory for all tiles, others go through registers at each
        queries = widen_queries(found, JOINED, MT)


@lru_cache(maxsize=8)
def num_programs(device: torch.device) -> int:
    """Programs of 8 warps that run at once: one fills a multiprocessor."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Config:
    heads: int  # of a program
    split: bool  # a program has one tile
    num_warps: int
    num_stages: int
    channels: int = 64  # of a product; more only with 64 heads
    passes: bool = False  # weights of all tiles, then values
    ahead: int = 0  # tiles that the launch after one with a tile a program loads together


PASSES = Config(64, False, 4, 3, passes=True)


def has_tensor_memory() -> bool:
    """sm_100: sums of 64 heads do not fit its tensor memory; 16 heads stay in registers."""
    return not interpreting() and triton.runtime.driver.active.get_current_target().arch >= 100


def _takes_few_heads(dim: int, rope_dim: int) -> bool:
    return has_tensor_memory() or len(set(pieces(dim, rope_dim))) > 1


def choose_config(
    num_tokens: int, num_heads: int, num_tiles: int, narrow: bool, few_heads: bool = False
) -> Config:
    """None of this changes a bit of the result. `few_heads`: 64 heads do not fit.

    The figures are microseconds on an H200 (docs/LOG.md): of as many programs as run at once, and
    of a second launch.
    """
    rooms = num_tokens * triton.cdiv(num_heads, 64) * num_tiles
    ahead = tiles_ahead(num_tiles)
    split = Config(16, True, 8 if narrow else 4, 1, ahead=ahead)
    fits = rooms <= tile_triton.MOST_ROOMS
    if few_heads or not narrow or num_heads <= 16:
        return split if fits else Config(16, False, 8 if narrow else 4, 2 if narrow else 1)
    blocks = num_tokens * triton.cdiv(num_heads, 16)
    wide = num_tokens * triton.cdiv(num_heads, 64)
    costs = {
        Config(16, False, 4, 2): (4.5 * num_tiles + 5) * triton.cdiv(blocks, 264),
        Config(16, False, 8, 3): (2.8 * num_tiles + 5.5) * triton.cdiv(blocks, 132),
        Config(64, False, 8, 3, 128): (4.2 * num_tiles + 8.5) * triton.cdiv(wide, 132),
    }
    if fits:
        merging = 2.5 + 0.03 * rooms
        costs[split] = 5.5 * triton.cdiv(blocks * num_tiles, 396) + merging
    if rooms <= passes_triton.MOST_ROOMS and num_heads % 64 == 0:
        values = (3 + 0.45 * num_tiles) * triton.cdiv(wide * 8, 528)
        costs[PASSES] = 6.0 * triton.cdiv(rooms, 396) + values
    return min(costs, key=costs.get)


def supports(q, sink, pool, table, compressed, batch, window, frequencies) -> str | None:
    if pool.activations != "a16":
        return f"queries are to be {pool.activations}, here they stay as they are"
    return form_reason(q, sink, pool, table, compressed, batch, window, frequencies)


def form_reason(q, sink, pool, table, compressed, batch, window, frequencies) -> str | None:
    """Why shapes, layouts or the device do not fit, or None."""
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.is_contiguous():
        return f"q is {q.dtype} with strides {q.stride()}, not contiguous bfloat16 or float32"
    if min(pieces(pool.dim, 2 * frequencies.shape[0]), default=0) < 16:
        return f"entries of {pool.dim} with {2 * frequencies.shape[0]} rotated, not multiples of 16"
    tensors = {"table": table, "positions": batch.positions, "seq_idx": batch.seq_idx}
    pools = [pool]
    if compressed is not None:
        pools.append(compressed.pool)
        tensors["compressed table"] = compressed.table
        if compressed.selected is not None:
            tensors["selected"] = compressed.selected
        if compressed.pool.format != pool.format or compressed.pool.dim != pool.dim:
            return f"window in {pool.format}, compressed entries in {compressed.pool.format}"
    for each in pools:
        tail = each.parts["tail"].shape[-1] if "tail" in each.parts else None
        if tail not in (None, 2 * frequencies.shape[0]):
            return f"entries keep {tail} channels apart, {frequencies.shape[0]} frequencies"
        if "scale" in each.parts and each.parts["scale"].shape[-1] != 8:
            return f"{each.parts['scale'].shape[-1]} scale bytes an entry, kernels read 8"
        reason = pool_reason(each)
        if reason is not None:
            return reason
    return device_reason(q.device) or index_tensors_reason(**tensors)


def form_of(num_tokens: int, model, num_entries: int, narrow: bool) -> Config:
    """What a model's layer with so many compressed entries will run."""
    num_tiles = triton.cdiv(model.sliding_window, BT) + triton.cdiv(num_entries, BT)
    few_heads = _takes_few_heads(model.head_dim, model.rope_head_dim)
    return choose_config(num_tokens, model.num_heads, num_tiles, narrow, few_heads)


def config_of(q, pool, compressed, window, rope_dim) -> Config:
    num_tiles = triton.cdiv(window, BT) + triton.cdiv(most_entries(compressed), BT)
    few_heads = _takes_few_heads(q.shape[2], rope_dim)
    config = choose_config(*q.shape[:2], num_tiles, is_narrow(q, pool), few_heads)
    if pool_format(pool) == FP8 or config.passes:
        return config
    return replace(config, num_stages=min(config.num_stages, 2))  # three do not fit


def run(q, sink, pool, table, compressed, batch, window, frequencies, config=None, eps=None):
    """With `eps` the queries are as they come from their matrix, and `query_prepare` is part."""
    config = config or config_of(q, pool, compressed, window, 2 * frequencies.shape[0])
    out = torch.empty_like(q)
    given = {
        "places": place_arguments(pool, table, compressed, batch),
        "constants": place_constants(q, pool, compressed, window, frequencies),
    }
    if config.split:
        tile_triton.run(q, sink, out, window, frequencies, config, eps, **given)
    elif config.passes:
        passes_triton.run(q, sink, out, window, frequencies, config, **given)
    else:
        _walk(q, sink, out, window, frequencies, config, **given)
    return out


def _walk(q, sink, out, window, frequencies, config, places, constants) -> None:
    tokens, heads, dim = q.shape
    items = tokens * triton.cdiv(heads, config.heads)
    most_programs = num_programs(q.device) * (2 if config.num_warps == 4 else 1)
    _attend_kernel[(min(items, most_programs),)](
        q,
        sink,
        out,
        *places,
        frequencies,
        heads,
        tokens,
        items,
        window,
        dim**-0.5 * LOG2E.value,
        **constants,
        JOINED=num_joined(dim, 2 * frequencies.shape[0], config.channels),
        BH=config.heads,
        **launch_options(config.num_warps, config.num_stages),
    )
