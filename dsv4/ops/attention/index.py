"""The indexer: score every visible compressed entry, keep the best `topk`.

    index_scores   score[t, b] = sum_h weight[t, h] * max(0, q[t, h] . key[b]);  -inf where hidden
    index_select   the `topk` best of a row, ties to the lower index, in ascending order

Entry `b` is visible to the token at `p` when `b < (p + 1) // 4`. Rows with at most `topk` visible
entries keep all of them, so their scores are not computed (they are 0).

With FP8 or FP4 keys the query comes from `index_query`, which rounds it the same way; a kernel may
rely on that and multiply codes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.entry import index_entry
from dsv4.ops.core.batch_invariance import ROW_TILE, pad_rows
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.core.ragged import Ragged, make_ragged
from dsv4.ops.kv.pool import PagedPool, allocate_pool, load, locate, rotates, round_index, store

RATIO = 4
KEY_TILE = 256  # entries scored at a time; fixed, so a score never depends on others


@dataclass(frozen=True, slots=True)
class IndexEntries:
    """What index queries score."""

    pool: PagedPool  # index keys
    table: Tensor  # [sequences, columns] int64
    batch: Ragged
    topk: int  # rows with at most this many visible entries keep all of them


def num_visible(positions: Tensor) -> Tensor:
    return torch.div(positions + 1, RATIO, rounding_mode="floor")


def _score_tile(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """`[rows, heads, dim]`, `[rows, heads]`, `[keys, dim]` -> `[rows, keys]`, by tiles of rows."""
    tiles = pad_rows(q).view(-1, ROW_TILE * q.shape[1], q.shape[2])
    products = torch.bmm(tiles, keys.t().expand(tiles.shape[0], -1, -1))
    products = products.view(-1, q.shape[1], keys.shape[0])[: q.shape[0]]
    return (products.relu_() * weights.unsqueeze(-1)).sum(1)


def index_scores_reference(q: Tensor, weights: Tensor, to: IndexEntries) -> Tensor:
    pool, table, batch = to.pool, to.table, to.batch
    visible = num_visible(batch.positions)
    width = int(visible.max())
    scores = torch.full((q.shape[0], -(-width // KEY_TILE) * KEY_TILE), float("-inf"))
    scores = scores.to(q.device)
    entry = torch.arange(scores.shape[1], device=q.device)
    scores.masked_fill_(entry < visible.unsqueeze(1), 0.0)
    wide_q, wide_weights = q.float(), weights.float()
    for sequence in range(table.shape[0]):
        rows = torch.nonzero((batch.seq_idx == sequence) & (visible > to.topk)).squeeze(1)
        if rows.numel() == 0:
            continue
        most = int(visible[rows].max())
        seq = torch.full((KEY_TILE,), sequence, device=q.device)
        for first in range(0, most, KEY_TILE):
            tile = entry[first : first + KEY_TILE]
            keys = load(pool, *locate(table, seq, tile.clamp(max=most - 1), pool.page_entries))
            scored = _score_tile(wide_q[rows], wide_weights[rows], keys)
            scored.masked_fill_(tile >= visible[rows].unsqueeze(1), float("-inf"))
            scores[rows, first : first + KEY_TILE] = scored
    return scores


def index_select_reference(scores: Tensor, topk: int) -> Tensor:
    width = min(topk, scores.shape[1])
    best, order = torch.sort(scores, dim=1, descending=True, stable=True)
    missing = scores.shape[1]
    kept = order[:, :width].masked_fill(best[:, :width] == float("-inf"), missing)
    kept = kept.sort(dim=1).values
    return kept.masked_fill(kept == missing, -1)


def score_cases() -> Iterable[Case]:
    def build(
        fmt: str, starts: list[int], new: list[int], heads: int, topk: int, dim: int = 32
    ) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            count = len(starts)
            batch = make_ragged(starts, new, list(range(count)), torch.device("cpu"))
            columns = -(-int(batch.ends.max()) // (RATIO * 8)) + 1
            table = torch.randperm(count * columns, generator=generator).view(count, columns)
            pool = allocate_pool(fmt, True, index_entry(fmt, dim), (count * columns, 8), "cpu")
            for page in range(count * columns):
                keys = torch.randn(8, dim, generator=generator)
                store(pool, torch.full((8,), page), torch.arange(8), keys)
            q = torch.randn(batch.num_tokens, heads, dim, generator=generator)
            return {
                "q": round_index(q, fmt) if rotates(fmt) else q,
                "weights": torch.randn(batch.num_tokens, heads, generator=generator),
                "to": IndexEntries(pool, table, batch, topk),
            }

        name = f"{fmt} {starts}+{new} heads {heads}x{dim} topk {topk}"
        return Case(name, make, 1e-3, 1e-3)

    for fmt in ("fp32", "fp8", "fp4"):
        yield build(fmt, [400, 90], [1, 1], 4, 8)
        yield build(fmt, [0], [70], 3, 5)
    yield build("bf16", [0, 2], [2, 40], 2, 100)
    for fmt in ("fp8", "fp4"):
        yield build(fmt, [600, 90], [1, 2], 20, 8, 128)


def select_cases() -> Iterable[Case]:
    def build(rows: int, width: int, topk: int, ties: bool) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            scores = torch.randn(rows, width, generator=generator)
            if ties:
                scores = (scores * 2).round()
            hidden = torch.randint(0, width + 1, (rows, 1), generator=generator)
            scores = scores.masked_fill(torch.arange(width) >= hidden, float("-inf"))
            return {"scores": scores, "topk": topk}

        return Case(f"{rows}x{width} top {topk}{' ties' if ties else ''}", make, 0.0, 0.0)

    yield build(4, 64, 8, False)
    yield build(7, 65, 16, True)
    yield build(3, 5, 8, True)
    yield build(2, 1000, 512, False)


SCORE_KERNELS = (Kernel("dsv4.ops.attention.index_scores_triton"),)
SELECT_KERNELS = (Kernel("dsv4.ops.attention.index_select_triton"),)
ON_CPU = "dsv4.ops.cpu.attention"
SCORES = Op("index_scores", index_scores_reference, score_cases, SCORE_KERNELS)
SELECT = Op("index_select", index_select_reference, select_cases, SELECT_KERNELS, on_cpu=ON_CPU)


def index_scores(q: Tensor, weights: Tensor, to: IndexEntries) -> Tensor:
    """`q` `[tokens, heads, dim]`, `weights` `[tokens, heads]` -> fp32 `[tokens, entries]`."""
    check_shape(SCORES.name, "q", q, to.batch.num_tokens, "heads", to.pool.dim)
    check_shape(SCORES.name, "weights", weights, *q.shape[:2])
    if q.shape[0] == 0:
        return q.new_empty(0, 0, dtype=torch.float32)
    return SCORES(q.device, q=q, weights=weights, to=to)


def index_select(scores: Tensor, topk: int) -> Tensor:
    """-> int64 `[tokens, min(topk, entries)]`, ascending; shorter rows are padded with -1."""
    check(scores.dim() == 2, SELECT.name, lambda: f"scores has shape {tuple(scores.shape)}")
    check(topk > 0, SELECT.name, lambda: f"topk is {topk}, expected at least 1")
    if scores.numel() == 0:
        return scores.new_empty(scores.shape[0], min(topk, scores.shape[1]), dtype=torch.int64)
    return SELECT(scores.device, scores=scores, topk=topk)
