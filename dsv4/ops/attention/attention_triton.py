# mypy: ignore-errors
"""`attention` on a GPU: all heads of a block against tiles of BT gathered entries.

A query's list of entries is its window, oldest first, then its compressed entries, ascending, cut
by index into tiles. Each tile has its own softmax; tiles are merged in ascending order, starting
from the sink. With few queries each tile has a program and a second launch merges; with more, one
launch computes all softmax weights and another the values (both in `variants/`); with many, one
program loops over a query's tiles (here; on sm_90 entries are unpacked first). Same sums, same
bits. Sums over entries are matrix products (the softmax denominator too), so no result depends on a
tile's thread layout. Channels are multiplied in ascending order, however many a matrix has.

The loop prefetches two tiles of entries into shared memory, the pages of the tile after them and
the selection of the next, and loads its next queries before it stores a result. Variables that a
loop rotates twice (`a = b; b = c`) would disable this: the compiler then loads everything where it
is used.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module, resources

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import query_triton
from dsv4.ops.attention import tile_device as td
from dsv4.ops.attention.variants import decode_split_triton, decode_two_pass_triton, unpack_triton
from dsv4.ops.attention.variants.merge_triton import tiles_ahead
from dsv4.ops.core.gpu import Gpu, describe
from dsv4.ops.core.helpers_device import append
from dsv4.ops.core.launch import device_reason, launch_options
from dsv4.ops.kv.entry_device import FP8, index_tensors_reason, nope_dim, pool_format, pool_reason


@triton.jit
def _queries_of(item, q, num_heads, BH: tl.constexpr, T: tl.constexpr):
    blocks = tl.cdiv(num_heads, BH)
    row = (item // blocks).to(tl.int64)
    head = (item % blocks) * BH + tl.arange(0, BH)
    q_at = (row * num_heads + head)[:, None] * T.dim
    return td.load_queries(q, q_at, head < num_heads, T)


@triton.jit(do_not_specialize=["num_tokens", "num_items", "num_selected", "w_width", "c_width"])
def _loop_kernel(
    q, sink, out, at, num_selected, w_width, c_width, frequencies, num_heads, num_tokens, num_items,
    window, qk_scale, RATIO: tl.constexpr, JOINED: tl.constexpr, BH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Items are (token, block of heads), heads fastest."""
    blocks = tl.cdiv(num_heads, BH)
    COUNT: tl.constexpr = len(td.pieces(T.dim, T.rope)) // JOINED
    found = _queries_of(tl.program_id(0), q, num_heads, BH, T)
    queries = td.widen_queries(found, JOINED, T.mt)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64)
        head = (item % blocks) * BH + tl.arange(0, BH)
        live = head < num_heads
        q_at = (row * num_heads + head)[:, None] * T.dim
        position = tl.load(at.positions + row).to(tl.int32)
        seq = tl.load(at.seq_idx + row).to(tl.int64)
        visible = tl.minimum((position + 1) // RATIO, num_selected)
        tiles = T.wt + tl.cdiv(visible, T.bt)
        best = tl.load(sink + head, mask=live, other=0.0).to(tl.float32) * td.LOG2E
        total = tl.full((BH,), 1.0, tl.float32)
        sums = ()
        for i in tl.static_range(COUNT):
            zero = tl.zeros((BH, td.chunk_width(T.dim, T.rope, JOINED, i)), tl.float32)
            sums = append(sums, zero)
        slot, present = td.tile_slots(
            0, position, visible, seq, row, window, at, num_selected, w_width, c_width, T
        )
        # prefetched: pages of the next tile and the selection of the one after
        older = td.tile_choice(1, visible, row, at, num_selected, T)
        page, inside, next_present = td.tile_pages(
            1, older, position, seq, window, at, w_width, c_width, T
        )
        older = td.tile_choice(2, visible, row, at, num_selected, T)
        for step in tl.range(0, tiles):
            stored, scales = td.fetch_tile(slot, step < T.wt, at, T)
            slot = td.slots_of(step + 1, page, inside, T)
            page, inside, later_present = td.tile_pages(
                step + 2, older, position, seq, window, at, w_width, c_width, T
            )
            older = td.tile_choice(step + 3, visible, row, at, num_selected, T)
            keys = td.widen_tile(stored, scales, JOINED, T, T.asm and BH == 16)
            weights, part, top = td.tile_weights(
                queries, keys, present, num_tokens, qk_scale, JOINED, BH, T
            )
            best, total, old_share, new_share = td.add_tile(best, total, top, part)
            grown = ()
            for i in tl.static_range(COUNT):
                zero = tl.zeros((BH, td.chunk_width(T.dim, T.rope, JOINED, i)), tl.float32)
                acc = td.dot(weights, keys[i], zero, T.mt)
                before = sums[i] * old_share[:, None]
                grown = append(grown, tl.fma(acc, new_share[:, None] + zero, before))
            sums = grown
            present = next_present & (step + 1 < tiles)
            next_present = later_present
        following = tl.minimum(item + tl.num_programs(0), num_items - 1)
        found = _queries_of(following, q, num_heads, BH, T)
        scale = 1.0 / total
        for i in tl.static_range(COUNT):
            td.finish_piece(
                sums[i], scale, out, q_at, live, position, frequencies,
                td.piece_first(T.dim, T.rope, i * JOINED), BH, T,
            )  # fmt: skip
        # loop-carried: the compiler keeps only such values, or those loaded unchanged,
        # in shared memory for all tiles; others go through registers for each tile
        queries = td.widen_queries(found, JOINED, T.mt)


def num_programs(device: torch.device) -> int:
    """Programs of 8 warps that run concurrently: one per multiprocessor."""
    return 4 if device.type != "cuda" else describe(device).multiprocessors


@dataclass(frozen=True)
class AttentionVariant:
    heads: int  # per program
    split: bool  # a program has one tile
    num_warps: int
    num_stages: int
    channels: int = 64  # per product; more only with 64 heads
    two_pass: bool = False  # weights of all tiles, then values
    ahead: int = 0  # tiles that the merging launch loads together
    unpacked: bool = False  # entries are unpacked first

    def __str__(self) -> str:
        """As `variant_costs.json` names them."""
        if self.two_pass:
            return "two pass"
        if self.unpacked:
            return "prefill"
        return f"{'split' if self.split else 'loop'} {self.heads}"


LOOP_BYTES = 121344  # of shared memory: keys in 16 bits, queries and two tiles as stored
TWO_PASS = AttentionVariant(64, False, 4, 3, two_pass=True)
UNPACKED = AttentionVariant(64, False, 8, 2, 128, unpacked=True)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer's attention in one step."""

    num_tokens: int
    num_sequences: int
    num_heads: int
    dim: int
    rope_dim: int
    window: int
    num_entries: int  # compressed ones that any query sees
    max_entries: int  # compressed ones that a sequence may have

    @property
    def num_tiles(self) -> int:
        return triton.cdiv(self.window, td.BT) + triton.cdiv(self.num_entries, td.BT)

    @property
    def num_rows(self) -> int:
        """Entries that would be unpacked."""
        return unpack_triton.num_rows(
            self.num_tokens, self.num_sequences, self.window, self.max_entries
        )

    def takes_few_heads(self, gpu: Gpu) -> bool:
        """Whether 64 heads do not fit: their sums, except with `wgmma`, or pieces of several
        widths."""
        return gpu.products != "wgmma" or len(set(td.pieces(self.dim, self.rope_dim))) > 1

    def unpacks(self, gpu: Gpu) -> bool:
        fits = self.num_rows <= unpack_triton.MOST_ROWS and self.window > 1
        return fits and (gpu.architecture, self.dim, self.rope_dim) == (90, 512, 64)


def variants_of(sizes: Sizes, narrow: bool, device: torch.device) -> dict[AttentionVariant, float]:
    """Variants that apply, and roughly how many microseconds each takes; all give the same bits.

    The figures come from records (`variant_costs.json`), the number of programs that run at once
    from the device.
    """
    tokens, heads, tiles = sizes.num_tokens, sizes.num_heads, sizes.num_tiles
    blocks, wide = tokens * triton.cdiv(heads, 16), tokens * triton.cdiv(heads, 64)
    wide_tiles = wide * tiles
    few = blocks * tiles <= 48
    split = AttentionVariant(16, True, 8 if narrow and few else 4, 1, ahead=tiles_ahead(tiles))
    fits = wide_tiles <= decode_split_triton.MOST_TILES
    gpu = describe(device)
    if sizes.takes_few_heads(gpu) or not narrow or heads <= 16:
        stages = 2 if narrow and gpu.shared_per_block >= LOOP_BYTES else 1
        only = split if fits else AttentionVariant(16, False, 8 if narrow else 4, stages)
        return {only: 0.0}
    cost, at_once = variant_costs(), gpu.multiprocessors

    def looping(name: str, items: int) -> float:
        fixed, per_tile = cost[name]
        return (per_tile * tiles + fixed) * triton.cdiv(items, at_once)

    def together(name: str, programs: int, each: int) -> float:
        fixed, per_program, per_wave = cost[name]
        waves = triton.cdiv(programs, each * at_once) - 1
        return fixed + per_program * programs + per_wave * waves

    costs = {
        AttentionVariant(16, False, 8, 3): looping("loop 16", blocks),
        AttentionVariant(64, False, 8, 3, 128): looping("loop 64", wide),
    }
    if fits:
        costs[split] = together("split 16", blocks * tiles, 3)
    if fits and heads % 64 == 0 and sizes.dim == 512:  # converts entries once for 64 heads
        whole = replace(split, heads=64, num_warps=8, channels=512)
        costs[whole] = together("split 64", wide_tiles, 1)
    if wide_tiles <= decode_two_pass_triton.MOST_TILES and heads % 64 == 0:
        fixed, per_tile, alone, per_wide_tile = cost["two pass"]
        costs[TWO_PASS] = max(fixed + per_tile * tiles, alone + per_wide_tile * wide_tiles)
    if sizes.unpacks(gpu):
        fixed, per_row = cost["unpacking"]
        costs[UNPACKED] = looping("prefill", wide) + fixed + per_row * sizes.num_rows
    return costs


@lru_cache(maxsize=1)
def variant_costs() -> dict[str, list[float]]:
    """Costs on the measured architecture; others run other variants, or use the same choice."""
    text = resources.files("dsv4.ops.attention").joinpath("variant_costs.json").read_text()
    return json.loads(text)["sm_90"]["microseconds"]


def supports(q, to) -> str | None:
    pool, older, rope_dim = to.pool, to.compressed, 2 * to.frequencies.shape[0]
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.is_contiguous():
        return f"q is {q.dtype} with strides {q.stride()}, not contiguous bfloat16 or float32"
    if min(td.pieces(pool.dim, rope_dim), default=0) < 16:
        return f"entries of {pool.dim} with {rope_dim} rotated, not multiples of 16"
    tensors = {"table": to.table, "positions": to.batch.positions, "seq_idx": to.batch.seq_idx}
    pools = [pool]
    if older is not None:
        pools.append(older.pool)
        tensors["compressed table"] = older.table
        if older.selected is not None:
            tensors["selected"] = older.selected
        if older.pool.format != pool.format or older.pool.dim != pool.dim:
            return f"window in {pool.format}, compressed entries in {older.pool.format}"
    for each in pools:
        if nope_dim(each) not in (each.dim, each.dim - rope_dim):
            return f"entries keep {each.dim - nope_dim(each)} channels apart, {rope_dim} rotated"
        if "scale" in each.parts and each.parts["scale"].shape[-1] != 8:
            return f"{each.parts['scale'].shape[-1]} scale bytes an entry, kernels read 8"
        reason = pool_reason(each)
        if reason is not None:
            return reason
    return device_reason(q.device) or index_tensors_reason(**tensors)


def choose_variant(q, to, *, unpacked=True) -> AttentionVariant:
    """The fastest variant; `unpacked`: whether it may unpack entries."""
    older, rope_dim = to.compressed, 2 * to.frequencies.shape[0]
    held = 0 if older is None else older.table.shape[1] * older.pool.page_entries
    entries = td.most_entries(older)
    sizes = Sizes(q.shape[0], to.table.shape[0], *q.shape[1:], rope_dim, to.window, entries, held)
    costs = variants_of(sizes, td.is_narrow(q, to.pool), q.device)
    if not unpacked:
        costs.pop(UNPACKED, None)
    config = min(costs, key=costs.get)
    if pool_format(to.pool) == FP8 or config.two_pass:
        return config
    return replace(config, num_stages=min(config.num_stages, 2))  # three do not fit


def variant(q, to) -> str:
    return str(choose_variant(q, to))


def run(q, to, config=None, eps=None):
    """With `eps` the queries are raw projections, and `query_prepare` is fused."""
    config = config or choose_variant(q, to)
    if config.unpacked:
        entries, recent = unpack_triton.unpack(q, to)
        prefill = import_module("dsv4.ops.attention.variants.prefill_gluon").prefill
        return prefill(q, to, entries, recent, num_programs(q.device), eps)
    out = torch.empty_like(q)
    if config.split:
        decode_split_triton.run(q, to, out, config, eps)
    elif config.two_pass:
        decode_two_pass_triton.run(q, to, out, config)
    else:
        _loop(q, to, out, config)
    return out


def compile_others(q, to, eps=None) -> None:
    """For other steps: the same tokens over more sequences may have too many entries to unpack;
    fewer tokens may or may not have their queries prepared here."""
    chosen = choose_variant(q, to)
    if chosen.unpacked:
        ready = query_triton.run(q, to.batch.positions, to.frequencies, 0.0)
        run(ready, to, choose_variant(q, to, unpacked=False))
        run(q, to, chosen, 0.0 if eps is None else None)


def _loop(q, to, out, config) -> None:
    tokens, heads, dim = q.shape
    items = tokens * triton.cdiv(heads, config.heads)
    most_programs = num_programs(q.device) * (2 if config.num_warps == 4 else 1)
    places, counts = td.tile_places(to)
    _loop_kernel[(min(items, most_programs),)](
        q, to.sink, out, places, *counts, to.frequencies, heads, tokens, items, to.window,
        dim**-0.5 * td.LOG2E.value, RATIO=td.ratio_of(to),
        JOINED=td.num_joined(dim, 2 * to.frequencies.shape[0], config.channels), BH=config.heads,
        T=td.tile_format(q, to), **launch_options(config.num_warps, config.num_stages),
    )  # fmt: skip
