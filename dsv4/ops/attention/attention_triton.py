# mypy: ignore-errors
"""`attention` on a GPU: all heads of a block against tiles of BT gathered entries.

A query's list of entries is its window, oldest first, then its compressed entries, ascending, cut
by index into tiles. Each tile has its own softmax; tiles are merged in ascending order, starting
from the sink. With few queries each tile has a program and a second launch merges; with many a
program walks a query's tiles. Same sums, same bits. Sums over entries are matrix products (the
softmax denominator too), so no result depends on how a tile is laid out over threads. Channels
are multiplied in ascending order, however many stand in one matrix.

A walking program has two tiles of entries on the way to shared memory, the pages of the tile after
them and the choice of the next, and loads its next queries before it stores a result. Names that a
loop hands on twice unchanged (`a = b; b = c`) would switch that off: the compiler then loads
everything where it is used.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.query_triton import prepare_heads
from dsv4.ops.attention.tiles_triton import (
    BT,
    LOG2E,
    add_tile,
    chunk_width,
    dot,
    fetch_tile,
    finish_piece,
    load_queries,
    merge_tiles,
    num_joined,
    num_pieces,
    piece_first,
    pieces,
    slots_of,
    tile_choice,
    tile_pages,
    tile_slots,
    tile_weights,
    widen_queries,
    widen_tile,
)
from dsv4.ops.attention.unpacked import unpack_triton
from dsv4.ops.compile_triton import compiling
from dsv4.ops.device import (
    device_reason,
    interpreting,
    launch_options,
    workspace,
)
from dsv4.ops.kv.entry_triton import (
    FP8,
    FP32,
    append,
    index_tensors_reason,
    pool_constants,
    pool_format,
    pool_reason,
    pool_tensors,
)

MOST_PARALLEL = 600  # programs of 64 heads with one tile each: their sums take 78 MB


@triton.jit
def _queries_of(
    item, q, num_tokens, num_heads, BH: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr
):
    blocks = tl.cdiv(num_heads, BH)
    row = ((item // blocks) % num_tokens).to(tl.int64)
    head = (item % blocks) * BH + tl.arange(0, BH)
    q_at = (row * num_heads + head)[:, None] * DIM
    return load_queries(q, q_at, head < num_heads, DIM, ROPE)


@triton.jit(do_not_specialize=["num_tokens", "num_items", "num_selected", "w_width", "c_width"])
def _attend_kernel(
    raw, q, sink, out, acc_out, stat_out, positions, seq_idx, selected, num_selected,
    w_data, w_tail, w_scale, w_table, w_width, c_data, c_tail, c_scale, c_table, c_width,
    frequencies, num_heads, num_tokens, num_items, window, ratio, qk_scale, eps,
    FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    JOINED: tl.constexpr, SPLIT: tl.constexpr, PREPARE: tl.constexpr, SELECTED: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, WT: tl.constexpr, W_ENTRIES: tl.constexpr,
    C_ENTRIES: tl.constexpr, MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Items are (tile if SPLIT, token, block of heads), the last fastest. PREPARE: queries are
    made of `raw` first; programs of the same heads all write the same."""
    blocks = tl.cdiv(num_heads, BH)
    COUNT: tl.constexpr = num_pieces(DIM, ROPE) // JOINED
    if not SPLIT:
        found = _queries_of(tl.program_id(0), q, num_tokens, num_heads, BH, DIM, ROPE)
        queries = widen_queries(found, JOINED, MT)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = ((item // blocks) % num_tokens).to(tl.int64)
        head = (item % blocks) * BH + tl.arange(0, BH)
        live = head < num_heads
        q_at = (row * num_heads + head)[:, None] * DIM
        position = tl.load(positions + row).to(tl.int32)
        seq = tl.load(seq_idx + row).to(tl.int64)
        visible = tl.minimum((position + 1) // ratio, num_selected)
        tiles = WT + tl.cdiv(visible, BT)
        tile = item // blocks // num_tokens
        if (not SPLIT) or tile < tiles:
            if PREPARE:
                prepare_heads(
                    raw, q, positions, frequencies, eps, num_heads, row, item % blocks,
                    BH, DIM, DIM, ROPE,
                )  # fmt: skip
                tl.debug_barrier()  # what other threads wrote is read below
            if SPLIT:
                found = _queries_of(item, q, num_tokens, num_heads, BH, DIM, ROPE)
                queries = widen_queries(found, JOINED, MT)
                slot, present = tile_slots(
                    tile, position, visible, seq, row, window, selected, num_selected,
                    w_table, w_width, c_table, c_width, WT, BT, W_ENTRIES, C_ENTRIES, SELECTED,
                )  # fmt: skip
                stored, scales = fetch_tile(
                    slot, tile < WT, w_data, w_tail, w_scale, c_data, c_tail, c_scale,
                    FORMAT, NOPE, DIM, ROPE,
                )  # fmt: skip
                keys = widen_tile(
                    stored, scales, JOINED, FORMAT, NOPE, DIM, ROPE, MT, ASM and BH == 16
                )
                weights, part, top = tile_weights(
                    queries, keys, present, num_tokens, qk_scale, JOINED, BH, BT, MT
                )
                at = (tile.to(tl.int64) * num_tokens + row) * num_heads + head
                tl.store(stat_out + at * 2, top, mask=live)
                tl.store(stat_out + at * 2 + 1, part, mask=live)
                for i in tl.static_range(COUNT):
                    zero = tl.zeros((BH, chunk_width(DIM, ROPE, JOINED, i)), tl.float32)
                    acc = dot(weights, keys[i], zero, MT)
                    channel = piece_first(DIM, ROPE, i * JOINED) + tl.arange(0, acc.shape[1])
                    acc_at = at[:, None] * DIM + channel[None, :]
                    tl.store(acc_out + acc_at, acc, mask=live[:, None])
            else:
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
                    older = tile_choice(
                        step + 3, visible, row, selected, num_selected, WT, BT, SELECTED
                    )
                    keys = widen_tile(
                        stored, scales, JOINED, FORMAT, NOPE, DIM, ROPE, MT, ASM and BH == 16
                    )
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
                found = _queries_of(following, q, num_tokens, num_heads, BH, DIM, ROPE)
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
    split: bool
    num_warps: int
    num_stages: int
    channels: int = 64  # of a product; more only with 64 heads
    unpacked: bool = False  # entries are unpacked first


def capability() -> int:
    """90 or more; 0 in the interpreter."""
    return 0 if interpreting() else triton.runtime.driver.active.get_current_target().arch


def choose_config(
    num_tokens: int,
    num_heads: int,
    num_tiles: int,
    narrow: bool,
    few_heads: bool = False,
    num_rows: int | None = None,
) -> Config:
    """None of this changes a bit of the result. `few_heads`: 64 heads do not fit; `num_rows`: of
    entries that could be unpacked first.

    The figures are microseconds on an H200 (docs/LOG.md): of a program with one tile, or of one
    that walks tiles, each for as many programs as run at once.
    """
    rooms = num_tokens * triton.cdiv(num_heads, 64) * num_tiles
    if few_heads or not narrow or num_heads <= 16:
        return Config(16, rooms <= MOST_PARALLEL, 8 if narrow else 4, 2 if narrow else 1)
    forms = {
        Config(16, False, 4, 2): (264, 4.5 * num_tiles + 5),
        Config(16, False, 8, 3): (132, 2.8 * num_tiles + 5.5),
        Config(64, False, 8, 3, 128): (132, 4.2 * num_tiles + 8.5),
    }
    ahead: dict[Config, float] = {}
    if num_rows is not None and num_rows <= unpack_triton.MOST_ROWS:
        unpacked = Config(64, False, 8, 2, 128, unpacked=True)
        forms[unpacked] = (132, 2.2 * num_tiles + 8.5)
        ahead[unpacked] = 3 + num_rows / 2000
    if rooms <= MOST_PARALLEL:
        forms |= {Config(16, True, 8, 1): (132, 9.0), Config(64, True, 8, 1, 128): (132, 18.0)}

    def cost(config: Config) -> float:
        at_once, each = forms[config]
        blocks = num_tokens * triton.cdiv(num_heads, config.heads)
        waves = triton.cdiv(blocks * (num_tiles if config.split else 1), at_once)
        return ahead.get(config, 0.0) + each * waves

    return min(forms, key=cost)


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


def _is_narrow(q, pool) -> bool:
    return q.dtype == torch.bfloat16 and pool_format(pool) != FP32


def most_entries(compressed) -> int:
    """That any query sees of the compressed ones."""
    if compressed is None:
        return 0
    if compressed.selected is not None:
        return compressed.selected.shape[1]
    return compressed.table.shape[1] * compressed.pool.page_entries


@dataclass(frozen=True)
class Sizes:
    """Of a layer's attention in one step."""

    num_tokens: int
    num_sequences: int
    num_heads: int
    dim: int
    rope_dim: int
    window: int
    num_entries: int  # compressed ones that any query sees
    num_held: int  # compressed ones that a sequence may have


def form_of(sizes: Sizes, narrow: bool, *, unpacked: bool = True) -> Config:
    num_tiles = triton.cdiv(sizes.window, BT) + triton.cdiv(sizes.num_entries, BT)
    rows = None
    fits = (capability(), sizes.dim, sizes.rope_dim) == (90, 512, 64) and sizes.window > 1
    if unpacked and fits:
        rows = unpack_triton.num_rows(
            sizes.num_tokens, sizes.num_sequences, sizes.window, sizes.num_held
        )
    # sm_100: sums of 64 heads do not fit its tensor memory; 16 heads stay in registers
    few_heads = capability() >= 100
    return choose_config(sizes.num_tokens, sizes.num_heads, num_tiles, narrow, few_heads, rows)


def config_of(q, pool, table, compressed, window, frequencies, *, unpacked=True) -> Config:
    held = 0 if compressed is None else compressed.table.shape[1] * compressed.pool.page_entries
    sizes = Sizes(
        q.shape[0], table.shape[0], q.shape[1], q.shape[2], 2 * frequencies.shape[0], window,
        most_entries(compressed), held,
    )  # fmt: skip
    config = form_of(sizes, _is_narrow(q, pool), unpacked=unpacked)
    if pool_format(pool) == FP8:
        return config
    return replace(config, num_stages=min(config.num_stages, 2))  # three do not fit


def entry_parts(pool):
    """data, tail and the scale bytes of an entry as one integer."""
    data, tail, scale = pool_tensors(pool)
    return data, tail, scale.view(torch.int64) if pool_format(pool) == FP8 else data


def run(q, sink, pool, table, compressed, batch, window, frequencies, config=None, eps=None):
    """With `eps` the queries are as they come from their matrix, and `query_prepare` is part."""
    tokens, heads, dim = q.shape
    constants = pool_constants(pool)
    other = pool if compressed is None else compressed.pool
    other_table = table if compressed is None else compressed.table
    selected = None if compressed is None else compressed.selected
    most = most_entries(compressed)
    num_tiles = triton.cdiv(window, BT) + triton.cdiv(most, BT)
    narrow = _is_narrow(q, pool)
    config = config or config_of(q, pool, table, compressed, window, frequencies)
    if config.unpacked:
        if compiling():  # as many tokens of more sequences may have too many entries to unpack
            other = config_of(q, pool, table, compressed, window, frequencies, unpacked=False)
            run(q, sink, pool, table, compressed, batch, window, frequencies, other)
        places = (pool, table, compressed, batch, window, frequencies)
        entries, recent = unpack_triton.unpack(*places, entry_parts)
        places = (compressed, batch, window, frequencies)
        walk = import_module("dsv4.ops.attention.unpacked.walk_triton").walk
        return walk(q, sink, entries, recent, *places, num_programs(q.device))
    # as many as any number of tokens could need: room that grows later is an allocation
    most_tokens = MOST_PARALLEL // (triton.cdiv(heads, 64) * num_tiles)
    size = most_tokens * heads * dim
    ready = q if eps is None else workspace(q.device, "prepared", max(q.numel(), size), q.dtype)
    out = torch.empty_like(q)
    blocks = triton.cdiv(heads, config.heads)
    items = tokens * blocks * (num_tiles if config.split else 1)
    most_programs = num_programs(q.device) * (2 if config.num_warps == 4 else 1)
    programs = items if config.split else min(items, most_programs)
    room = num_tiles * max(tokens, most_tokens) * heads if config.split else 1
    acc = workspace(q.device, "attention_sums", room * dim, torch.float32)
    stats = workspace(q.device, "attention_stats", 2 * room, torch.float32)
    mt = tl.float32 if not narrow else (tl.float16 if pool_format(pool) == FP8 else tl.bfloat16)
    _attend_kernel[(programs,)](
        q,
        ready,
        sink,
        out,
        acc,
        stats,
        batch.positions,
        batch.seq_idx,
        batch.positions if selected is None else selected,
        most,
        *entry_parts(pool),
        table,
        table.shape[1],
        *entry_parts(other),
        other_table,
        other_table.shape[1],
        frequencies,
        heads,
        tokens,
        items,
        window,
        1 if compressed is None else compressed.ratio,
        dim**-0.5 * LOG2E.value,
        0.0 if eps is None else eps,
        **{name: constants[name] for name in ("FORMAT", "NOPE", "DIM")},
        ROPE=2 * frequencies.shape[0],
        JOINED=num_joined(dim, 2 * frequencies.shape[0], config.channels),
        SPLIT=config.split,
        PREPARE=eps is not None,
        SELECTED=selected is not None,
        BH=config.heads,
        BT=BT,
        WT=triton.cdiv(window, BT),
        W_ENTRIES=pool.page_entries,
        C_ENTRIES=other.page_entries,
        MT=mt,
        ASM=not interpreting(),
        **launch_options(config.num_warps, config.num_stages),
    )
    if config.split:
        merge_tiles(
            q,
            sink,
            out,
            acc,
            stats,
            batch.positions,
            frequencies,
            window,
            most,
            1 if compressed is None else compressed.ratio,
        )
    return out
