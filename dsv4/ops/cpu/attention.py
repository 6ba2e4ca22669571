"""Queries, selection and attention of few rows on a CPU."""

import numpy as np
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
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.core.rows import ROW_TILE
from dsv4.ops.cpu.arrays import Array, exp, fp32, normed, tensor
from dsv4.ops.cpu.step import entry_rows, few_rows, once, rotate, rotation, rounded_to
from dsv4.ops.kv.pool import PagedPool, load_at, round_trip_index

Tile = tuple[PagedPool, Tensor, Array | None]  # where the keys are, which are absent


def _tile(pool: PagedPool, table: Tensor, batch: Ragged, entries: Array) -> Tile | None:
    """None where no query sees an entry."""
    absent: Array | None = None
    if entries.min() < 0:
        if entries.max() < 0:
            return None
        absent, entries = entries < 0, np.maximum(entries, 0)
    seq = batch.seq_idx.numpy()[:, None]
    return pool, entry_rows(table, pool.page_entries, seq, entries), absent


def _window(batch: Ragged, pool: PagedPool, table: Tensor, window: int) -> Tile | None:
    entries = batch.positions.numpy()[:, None] + np.arange(1 - window, 1)
    return _tile(pool, table, batch, entries)


def _compressed(batch: Ragged, compressed: Compressed) -> list[Tile | None]:
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
    return [
        _tile(compressed.pool, compressed.table, batch, entries[:, at : at + KEY_TILE])
        for at in range(0, entries.shape[1], KEY_TILE)
    ]


def attention(q: Tensor, to: Visible) -> Tensor:
    batch, pool, table, window = to.batch, to.pool, to.table, to.window
    if not few_rows(batch) or q.shape[1] % HEAD_TILE:
        return attention_reference(q, to)
    size = pool.page_entries
    own = once(
        batch, ("window", size, window), lambda: _window(batch, pool, table, window), of=table
    )
    tiles = [] if own is None else [(pool, *own[1:])]
    if to.compressed is not None:
        tiles += [tile for tile in _compressed(batch, to.compressed) if tile is not None]
    wide_q = tensor(q.float().numpy() * fp32(q.shape[2] ** -0.5))
    top = to.sink.float().numpy().reshape(1, -1, 1)
    out, total = np.zeros(q.shape, dtype=np.float32), fp32(1.0)
    for pool, rows, absent in tiles:
        keys = load_at(pool, rows)
        if absent is not None:
            keys.masked_fill_(tensor(absent).unsqueeze(-1), 0.0)
        scores = _by_heads(wide_q, keys.transpose(1, 2)).numpy()
        if absent is not None:
            np.copyto(scores, -np.inf, where=absent[:, None])
        new_top = np.maximum(top, scores.max(-1, keepdims=True))
        shrink = exp(top - new_top)
        scores -= new_top
        weights = tensor(scores).exp_()
        total = total * shrink + weights.sum(-1, keepdim=True).numpy()
        out *= shrink
        out += _by_heads(weights.to(q.dtype).float(), keys).numpy()
        top = new_top
    out /= total
    out = rounded_to(q.dtype, out)
    rotate(out, rotation(batch.positions, to.frequencies), inverse=True)
    return tensor(out).to(q.dtype)


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
    if scores.shape[0] > ROW_TILE:
        return index_select_reference(scores, topk)
    rows = scores.numpy()
    kept = np.full((len(rows), min(topk, rows.shape[1])), -1)
    for row, own in zip(rows, kept, strict=True):
        count = min(np.count_nonzero(row > -np.inf), len(own))
        own[:count] = np.sort(np.argsort(-row, kind="stable")[:count])
    return tensor(kept)
