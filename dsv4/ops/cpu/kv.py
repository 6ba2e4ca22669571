"""Stores window keys and compressed entries of few rows on a CPU."""

import numpy as np

from dsv4.ops.core.ragged import Ragged
from dsv4.ops.cpu.arrays import Array, exp, normed, tensor
from dsv4.ops.cpu.step import (
    entry_rows,
    few_rows,
    once,
    rotate,
    rotation,
    rounded_to,
    store_rows,
)
from dsv4.ops.kv.compress import Compression, compress_reference, overlaps
from dsv4.ops.kv.kv_store import WindowKey, kv_store_reference


def kv_store(key: WindowKey) -> None:
    kv, batch = key.kv, key.batch
    if not few_rows(batch):
        kv_store_reference(key)
        return
    keys = rounded_to(kv.dtype, normed(kv, key.norm, key.eps))
    rotate(keys, rotation(batch.positions, key.frequencies))
    store_rows(key.pool, key_rows(key), keys, kv.dtype)


def key_rows(key: WindowKey) -> Array:
    """Where the keys of this step are stored."""
    batch, table, size = key.batch, key.table, key.pool.page_entries
    return once(
        batch,
        ("key", size),
        lambda: entry_rows(table, size, batch.seq_idx.numpy(), batch.positions.numpy()),
        of=table,
    )


def compress(block: Compression) -> None:
    """Rows are stored first, so every token of a closing block is in the state. With ratio 128 a
    row after the block would overwrite its first."""
    values, state, batch, ratio = block.values, block.state, block.batch, block.ratio
    is_few = few_rows(batch) and batch.keep is None
    if is_few:
        size = state.rows
        slots, rows, closing = once(
            batch, ("compressor", ratio, size), lambda: _places(batch, ratio, size)
        )
        is_few = overlaps(ratio) or batch.one_each or not len(closing)
    if not is_few:
        compress_reference(block)
        return
    positions, width = batch.positions.numpy(), values.shape[1]
    held_values, held_gates = (held.view(-1, width).numpy() for held in (state.values, state.gates))
    held_values[rows] = values.numpy()
    held_gates[rows] = block.gates.numpy() + block.ape.numpy()[positions % ratio]
    if not len(closing):
        return
    last = positions[closing]
    v, z = (_block(held, slots[closing], last, ratio, size) for held in (held_values, held_gates))
    if overlaps(ratio) and (last < ratio).any():
        before = last < ratio
        v[before, :ratio], z[before, :ratio] = 0.0, -np.inf
    z -= z.max(1, keepdims=True)
    weights = exp(z)
    weights /= tensor(weights).sum(1, keepdim=True).numpy()
    weights *= v
    entries = tensor(weights).sum(1).to(block.dtype)
    keys = rounded_to(block.dtype, normed(entries, block.norm, block.eps))
    numbers, page = last // ratio, block.pool.page_entries
    rotate(keys, rotation(tensor(numbers * ratio), block.frequencies))
    where = entry_rows(block.table, page, batch.seq_idx.numpy()[closing], numbers)
    store_rows(block.pool, where, keys, block.dtype)


def _places(batch: Ragged, ratio: int, size: int) -> tuple[Array, Array, Array]:
    """Each row's slot and place in the state; the rows that close a block."""
    positions = batch.positions.numpy()
    slots = batch.slots.numpy().take(batch.seq_idx.numpy())
    closing = np.flatnonzero((positions + 1) % ratio == 0)
    return slots, slots * size + positions % size, closing


def _block(held: Array, slots: Array, last: Array, ratio: int, size: int) -> Array:
    """The state rows that each entry reads, `[blocks, tokens, dim]`."""
    count = 2 * ratio if overlaps(ratio) else ratio
    tokens = last[:, None] + np.arange(1 - count, 1)
    found = held.take(slots[:, None] * size + tokens % size, axis=0)
    if not overlaps(ratio):
        return found
    dim = held.shape[1] // 2
    return np.concatenate((found[:, :ratio, :dim], found[:, ratio:, dim:]), axis=1)
