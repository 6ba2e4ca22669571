"""Queries, selection and attention of few rows on a CPU."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.attention.attention import (
    HEAD_TILE,
    KEY_TILE,
    Compressed,
    Visible,
    _by_heads,
    attention_reference,
)
from dsv4.ops.attention.index import index_select_reference
from dsv4.ops.attention.query import index_query_reference, query_prepare_reference
from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.cpu.arrays import Array, exp, fp32, normed, tensor
from dsv4.ops.cpu.step import (
    entry_rows,
    few_rows,
    load_rows,
    once,
    rotate,
    rotation,
    rounded_to,
)
from dsv4.ops.kv.pool import PagedPool, round_trip_index

ZERO = fp32(0.0)


class Tile(NamedTuple):
    """Keys of one step of the online softmax."""

    pool: PagedPool
    rows: Array  # [queries, keys]: where they are, counted over all pages
    gaps: list[tuple[int, slice]]  # each query's absent keys, which read another entry


def _tile(
    pool: PagedPool, table: Tensor, batch: Ragged, entries: Array, at_end: bool
) -> Tile | None:
    """None if no query sees an entry; absent entries come first or, with `at_end`, last."""
    gaps = []
    size = entries.shape[1]
    for query, absent in enumerate(np.count_nonzero(entries < 0, axis=1).tolist()):
        if absent:
            gaps.append((query, slice(size - absent, size) if at_end else slice(absent)))
    if gaps:
        if entries.max() < 0:
            return None
        entries = np.maximum(entries, 0)
    seq = batch.seq_idx.numpy()[:, None]
    return Tile(pool, entry_rows(table, pool.page_entries, seq, entries), gaps)


def _window(batch: Ragged, pool: PagedPool, table: Tensor, window: int) -> Tile | None:
    entries = batch.positions.numpy()[:, None] + np.arange(1 - window, 1)
    return _tile(pool, table, batch, entries, at_end=False)


def _compressed(batch: Ragged, compressed: Compressed) -> list[Tile]:
    positions = batch.positions.numpy()
    if compressed.selected is not None:
        entries = compressed.selected.numpy()
    else:
        visible = (positions + 1) // compressed.ratio
        entries = np.arange(visible.max())
        entries = np.where(entries < visible[:, None], entries, -1)
    missing = -entries.shape[1] % KEY_TILE
    if missing:
        beyond = np.full((len(entries), missing), -1)
        entries = np.concatenate((entries, beyond), axis=1)
    tiles = (
        _tile(compressed.pool, compressed.table, batch, entries[:, at : at + KEY_TILE], at_end=True)
        for at in range(0, entries.shape[1], KEY_TILE)
    )
    return [tile for tile in tiles if tile is not None]


def _compressed_tiles(batch: Ragged, compressed: Compressed) -> list[Tile]:
    """Layers without a selection share these; only their pools differ."""
    if compressed.selected is not None:
        return _compressed(batch, compressed)
    size, ratio = compressed.pool.page_entries, compressed.ratio
    key = ("compressed", size, ratio)
    shared = once(batch, key, lambda: _compressed(batch, compressed), of=compressed.table)
    return [tile._replace(pool=compressed.pool) for tile in shared]


def attention(q: Tensor, to: Visible) -> Tensor:
    batch = to.batch
    if not few_rows(batch) or q.shape[1] % HEAD_TILE:
        return attention_reference(q, to)
    wide_q = tensor(q.float().numpy() * fp32(q.shape[2] ** -0.5))
    out = rounded_to(q.dtype, softmax_over(wide_q, q.dtype, to.sink, tiles_of(to)))
    rotate(out, rotation(batch.positions, to.frequencies), inverse=True)
    return tensor(out).to(q.dtype)


def tiles_of(to: Visible) -> list[Tile]:
    batch, pool, table, window = to.batch, to.pool, to.table, to.window
    key = ("window", pool.page_entries, window)
    own = once(batch, key, lambda: _window(batch, pool, table, window), of=table)
    assert own is not None  # a token sees itself
    tiles = [Tile(pool, own.rows, own.gaps)]
    if to.compressed is not None:
        tiles += _compressed_tiles(batch, to.compressed)
    return tiles


def softmax_over(wide_q: Tensor, dtype: torch.dtype, sink: Tensor, tiles: list[Tile]) -> Array:
    """Online softmax over `tiles` in order; the sink is the first score, with value 0."""
    top: Array = sink.float().numpy().reshape(1, -1, 1)
    total, out = fp32(1.0), ZERO
    for pool, rows, gaps in tiles:
        keys = load_rows(pool, rows)
        found = keys.numpy()
        for query, absent in gaps:
            found[query, absent] = 0.0
        scores = _by_heads(wide_q, keys.transpose(1, 2)).numpy()
        for query, absent in gaps:
            scores[query, :, absent] = -np.inf
        new_top = np.maximum(top, np.maximum.reduce(scores, -1, keepdims=True))
        shrink = exp(top - new_top)
        scores -= new_top
        weights = tensor(scores).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True).numpy()
        out = out * shrink + _by_heads(weights.to(dtype).float(), keys).numpy()
        top = new_top
    out /= total
    return out


def query_prepare(q: Tensor, positions: Tensor, frequencies: Tensor, eps: float) -> Tensor:
    if q.shape[0] > ROW_TILE:
        return query_prepare_reference(q, positions, frequencies, eps)
    rows = rounded_to(q.dtype, normed(q, None, eps))
    rotate(rows, rotation(positions, frequencies))
    return tensor(rows).to(q.dtype)


def index_query(q: Tensor, positions: Tensor, frequencies: Tensor, index_format: str) -> Tensor:
    if q.shape[0] > ROW_TILE:
        return index_query_reference(q, positions, frequencies, index_format)
    rows = q.float().numpy().copy()
    rotate(rows, rotation(positions, frequencies))
    return round_trip_index(tensor(rows).to(q.dtype), index_format)


def index_select(scores: Tensor, topk: int) -> Tensor:
    rows = scores.numpy()
    if len(rows) > ROW_TILE or np.isnan(rows).any():
        return index_select_reference(scores, topk)
    kept = np.full((len(rows), min(topk, rows.shape[1])), -1)
    for row, own in zip(rows, kept, strict=True):
        count = min(np.count_nonzero(row > -np.inf), len(own))
        own[:count] = np.sort(np.argsort(-row, kind="stable")[:count])
    return tensor(kept)
