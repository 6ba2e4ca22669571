"""Attention of new tokens over their window and their compressed entries, with a sink.

Keys are values. Query `p` sees the window keys `p - window < j <= p` and, in compressed layers,
the entries `b < (p + 1) // ratio`: all of them, or those in `selected`. One softmax covers both;
`exp(sink)` is added only to the denominator. The result is rotated back at `p`.

The order of summation depends on the query, not on the batch: the window's keys by position as one
tile, then entries ascending, KEY_TILE at a time, with an online softmax that starts from the sink.
A tile with nothing visible changes nothing. Every query is its own product in a batch of equal
products of exactly HEAD_TILE heads, the last ones padded: a head's result does not depend on how
many others there are.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.entry import kv_entry
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape
from dsv4.ops.core.ragged import Ragged, make_ragged
from dsv4.ops.kv.pool import PagedPool, allocate_pool, load, locate, store
from dsv4.ops.kv.rope import rope_frequencies, rope_reference

KEY_TILE = 32
HEAD_TILE = 8
QUERIES_AT_ONCE = 32  # bounds the memory of gathered keys


@dataclass(frozen=True)
class Compressed:
    """A layer's compressed entries: all visible ones, or those selected per token."""

    pool: PagedPool
    table: Tensor
    ratio: int
    selected: Tensor | None  # [tokens, k] entry numbers, ascending, -1 where there is none


@dataclass(frozen=True)
class Visible:
    """What queries attend to; window keys are in `pool` under `table`."""

    sink: Tensor
    pool: PagedPool
    table: Tensor
    compressed: Compressed | None
    batch: Ragged
    window: int
    frequencies: Tensor


def _pad_to_tiles(entries: Tensor) -> Tensor:
    """`entries` with -1 appended up to a multiple of KEY_TILE."""
    return torch.nn.functional.pad(entries, (0, -entries.shape[1] % KEY_TILE), value=-1)


def _window_entries(positions: Tensor, window: int) -> Tensor:
    """Positions of the window keys, oldest first, negative before the sequence's start."""
    offsets = torch.arange(1 - window, 1, device=positions.device)
    return positions.unsqueeze(1) + offsets


def _compressed_entries(compressed: Compressed, positions: Tensor) -> Tensor:
    """Entry numbers of each token, ascending, -1 where there is none."""
    if compressed.selected is not None:
        return _pad_to_tiles(compressed.selected)
    visible = torch.div(positions + 1, compressed.ratio, rounding_mode="floor")
    numbers = torch.arange(int(visible.max()), device=positions.device)
    return _pad_to_tiles(torch.where(numbers < visible.unsqueeze(1), numbers, -1))


def _by_heads(rows: Tensor, keys: Tensor) -> Tensor:
    """`[queries, heads, k] x [queries, k, n]`, HEAD_TILE heads at a time."""
    if rows.shape[1] == HEAD_TILE:
        return torch.bmm(rows, keys)
    tiles = torch.split(rows, HEAD_TILE, dim=1)
    return torch.cat([torch.bmm(tile.contiguous(), keys) for tile in tiles], dim=1)


def _online_softmax(
    q: Tensor,
    sink: Tensor,
    tiles: list[tuple[PagedPool, Tensor, Tensor]],
    seq: Tensor,
    scale: float,
) -> Tensor:
    """Some queries: online softmax over `tiles` (pool, table, entries), in order."""
    top = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    total = torch.ones_like(top)
    out = torch.zeros_like(q, dtype=torch.float32)
    wide_q = q.float() * scale
    for pool, table, entries in tiles:
        absent = entries < 0
        num_absent = int(absent.sum())
        if num_absent == entries.numel():
            continue
        where = locate(table, seq.unsqueeze(1), entries.clamp(min=0), pool.page_entries)
        keys = load(pool, *where)
        if num_absent:
            keys.masked_fill_(absent.unsqueeze(-1), 0.0)
        scores = _by_heads(wide_q, keys.transpose(1, 2))
        if num_absent:
            scores.masked_fill_(absent.unsqueeze(1), float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + _by_heads(weights.to(q.dtype).float(), keys)
        top = new_top
    return out / total


def attention_reference(q: Tensor, to: Visible) -> Tensor:
    positions, heads, sink, compressed = to.batch.positions, q.shape[1], to.sink, to.compressed
    if heads % HEAD_TILE:
        missing = -heads % HEAD_TILE
        q = torch.cat([q, q.new_zeros(q.shape[0], missing, q.shape[2])], dim=1)
        sink = torch.cat([sink, sink.new_zeros(missing)])
    sources = [(to.pool, to.table, _window_entries(positions, to.window))]
    if compressed is not None:
        entries = _compressed_entries(compressed, positions)
        sources += [
            (compressed.pool, compressed.table, entries[:, at : at + KEY_TILE])
            for at in range(0, entries.shape[1], KEY_TILE)
        ]
    parts = []
    for at in range(0, q.shape[0], QUERIES_AT_ONCE):
        rows = slice(at, at + QUERIES_AT_ONCE)
        tiles = [(pool, table, entries[rows]) for pool, table, entries in sources]
        seq, scale = to.batch.seq_idx[rows], q.shape[2] ** -0.5
        parts.append(_online_softmax(q[rows], sink.float(), tiles, seq, scale))
    out = torch.cat(parts)[:, :heads].to(q.dtype)
    return rope_reference(out, positions, to.frequencies, inverse=True)


def _filled(generator: torch.Generator, fmt: str, dim: int, pages: int, entries: int) -> PagedPool:
    pool = allocate_pool(fmt, False, kv_entry(fmt, dim, 16), (pages, entries), "cpu")
    for page in range(pages):
        keys = torch.randn(entries, dim, generator=generator)
        store(pool, torch.full((entries,), page), torch.arange(entries), keys)
    return pool


def cases() -> Iterable[Case]:
    def build(
        fmt: str, starts: list[int], new: list[int], heads: int, window: int, ratio: int, topk: int
    ) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            count, dim = len(starts), 48
            batch = make_ragged(starts, new, list(range(count)), torch.device("cpu"))
            last = int(batch.ends.max())
            columns = -(-last // 8)
            pages = torch.randperm(count * columns, generator=generator).view(count, columns)
            compressed = None
            if ratio:
                blocks = max(-(-last // (ratio * 8)), 1)
                table = torch.randperm(count * blocks, generator=generator)
                table = table.view(count, blocks)
                selected = _random_selection(generator, batch, ratio, topk) if topk else None
                entries = _filled(generator, fmt, dim, count * blocks, 8)
                compressed = Compressed(entries, table, ratio, selected)
            q = torch.randn(batch.num_tokens, heads, dim, generator=generator)
            to = Visible(
                sink=torch.randn(heads, generator=generator),
                pool=_filled(generator, fmt, dim, count * columns, 8),
                table=pages,
                compressed=compressed,
                batch=batch,
                window=window,
                frequencies=rope_frequencies(16, 10000.0),
            )
            return {"q": q, "to": to}

        name = f"{fmt} {starts}+{new} heads {heads} window {window} ratio {ratio} top {topk}"
        return Case(name, make, 2e-3, 2e-3)

    for fmt in ("fp32", "fp8"):
        yield build(fmt, [0], [5], 2, 8, 0, 0)
        yield build(fmt, [300, 17], [1, 3], 4, 32, 4, 16)
        yield build(fmt, [255, 0], [2, 40], 3, 7, 128, 0)
    yield build("bf16", [131], [1], 8, 128, 4, 8)


def _random_selection(generator: torch.Generator, batch: Ragged, ratio: int, topk: int) -> Tensor:
    rows = []
    for position in batch.positions.tolist():
        visible = (position + 1) // ratio
        kept = torch.randperm(visible, generator=generator)[:topk].sort().values
        rows.append(torch.nn.functional.pad(kept, (0, topk - kept.numel()), value=-1))
    return torch.stack(rows)


KERNELS = (Kernel("dsv4.ops.attention.attention_triton"),)
OP = Op("attention", attention_reference, cases, KERNELS, on_cpu="dsv4.ops.cpu.attention")


def attention(q: Tensor, to: Visible) -> Tensor:
    """`q` `[tokens, heads, dim]` -> the same shape."""
    check_shape(OP.name, "q", q, to.batch.num_tokens, "heads", to.pool.dim)
    check_shape(OP.name, "sink", to.sink, q.shape[1])
    if q.shape[0] == 0:
        return torch.empty_like(q)
    return OP(q.device, q=q, to=to)
