"""Shared by all layers in a step of few rows on a CPU: angles, and where entries are stored."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.cpu.arrays import Array, kept, tensor
from dsv4.ops.kv.pool import PagedPool, load_at, store_at

MOST_ROTATIONS = 64

T = TypeVar("T")
Rotations: TypeAlias = dict[tuple[int, ...], tuple[Tensor, Array, Array]]


def few_rows(batch: Ragged) -> bool:
    """Whether all rows fit into one tile, and none is padding."""
    if batch.num_tokens > ROW_TILE:
        return False
    return once(batch, ("few",), lambda: min(batch.positions.tolist(), default=-1) >= 0)


def once(
    batch: Ragged, key: tuple[object, ...], compute: Callable[[], T], of: Tensor | None = None
) -> T:
    """A value that `key` and the tensor `of` determine, computed once per step."""
    found: tuple[T, Tensor | None] | None = batch.shared.get((*key, id(of)))
    if found is None:
        found = batch.shared[(*key, id(of))] = compute(), of  # held, so no other gets its id
    return found[0]


def entry_rows(table: Tensor, page_entries: int, seq: Array, entries: Array) -> Array:
    """Where `entries` of the sequences `seq` are, counted over all pages; shapes broadcast."""
    width = table.shape[1]
    column = entries // page_entries
    column %= width
    pages = table.numpy().take(column + seq * width)
    pages *= page_entries
    pages += entries % page_entries
    return pages


def load_rows(pool: PagedPool, rows: Array) -> Tensor:
    """`load_at`; returns a copy."""
    if pool.format != "fp32":
        return load_at(pool, tensor(rows))
    data = pool.data
    return tensor(data.view(-1, data.shape[-1]).numpy().take(rows, axis=0))


def store_rows(pool: PagedPool, rows: Array, x: Array, dtype: torch.dtype) -> None:
    """`store_at` of fp32 numbers that are rounded to `dtype` first."""
    if pool.format == "fp32" and dtype == torch.float32:
        data = pool.data
        data.view(-1, data.shape[-1]).numpy()[rows] = x
    else:
        store_at(pool, tensor(rows), tensor(x).to(dtype))


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Array, Array]:
    """cos and sin of the angles, `[tokens, rope_dim / 2]`, as in `rope`."""
    rotations: Rotations = kept(("rotations",), dict)
    key = (id(frequencies), *positions.tolist())
    found = rotations.get(key)
    if found is None or found[0] is not frequencies:
        if len(rotations) >= MOST_ROTATIONS:
            rotations.clear()
        angles = positions.float().unsqueeze(-1) * frequencies
        found = frequencies, angles.cos().numpy(), angles.sin().numpy()
        rotations[key] = found
    return found[1:]


def rotate(x: Array, by: tuple[Array, Array], inverse: bool = False) -> None:
    """`rope` in place, `[tokens, dim]` or `[tokens, heads, dim]`."""
    cos, sin = by
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    first = x.shape[-1] - 2 * cos.shape[-1]
    u, v = x[..., first::2], x[..., first + 1 :: 2]
    u_sin, v_sin = u * sin, v * sin
    u *= cos
    v *= cos
    if inverse:
        u += v_sin
        v -= u_sin
    else:
        u -= v_sin
        v += u_sin


def rounded_to(dtype: torch.dtype, x: Array) -> Array:
    """`x` rounded to `dtype`, back in fp32."""
    return x if dtype == torch.float32 else tensor(x).to(dtype).float().numpy()
