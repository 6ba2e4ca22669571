"""`mhc_pre`, `mhc_boundary` and `mhc_head` of few rows on a CPU.

Calls cost more than arithmetic here, and making an array view is a call too. So everything that
does not leave an op is in a `Scratch`, which keeps its arrays and all their views across steps.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.core.batch_invariance import ROW_TILE, matmul_rows
from dsv4.ops.cpu.arrays import Array, RowNorm, fp32, kept, tensor
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.mhc.mix import (
    MixSite,
    Update,
    mhc_boundary_reference,
    mhc_head_reference,
    mhc_pre_reference,
)

MOST_STREAMS = 4  # torch adds more numbers in another order
ONE, TWO = fp32(1.0), fp32(2.0)


def mhc_pre(streams: Tensor, site: MixSite) -> tuple[Tensor, Tensor, Tensor]:
    if not are_few(streams):
        return mhc_pre_reference(streams, site)
    scratch = scratch_of(streams)
    np.copyto(scratch.wide, streams.float().numpy())
    post, comb = scratch.mixed(site)
    return scratch.result(), post, comb


def mhc_boundary(
    streams: Tensor, update: Update, site: MixSite
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not are_few(streams):
        return mhc_boundary_reference(streams, update, site)
    scratch = scratch_of(streams)
    streams = scratch.updated(streams, update)
    post, comb = scratch.mixed(site)
    return streams, scratch.result(), post, comb


def mhc_head(streams: Tensor, update: Update, site: MixSite) -> Tensor:
    if not are_few(streams):
        return mhc_head_reference(streams, update, site)
    scratch = scratch_of(streams)
    scratch.updated(streams, update)
    weights = tensor(np.negative(scratch.logits(site))).exp_().numpy()
    weights += ONE
    np.reciprocal(weights, weights)
    scratch.collapse(weights[..., None], site)
    return scratch.result()


def are_few(streams: Tensor) -> bool:
    count, n, _ = streams.shape
    return 0 < count <= ROW_TILE and 1 < n <= MOST_STREAMS


def scratch_of(streams: Tensor) -> "Scratch":
    shape, dtype = streams.shape, streams.dtype
    count, n, size = shape
    return kept(("mix", shape, dtype), lambda: Scratch(count, n, size, dtype))


class Scratch:
    def __init__(self, count: int, n: int, size: int, dtype: torch.dtype) -> None:
        def empty(*shape: int) -> Array:
            return np.empty(shape, dtype=np.float32)

        self.count, self.dtype = count, dtype
        self.products = empty(count, n, n, size)
        self.terms = [self.products[:, source] for source in range(n)]
        # the streams in a tile; its other rows stay zero
        tile = np.zeros((ROW_TILE, n * size), dtype=np.float32)
        self.tile, self.wide = tensor(tile), tile[:count].reshape(count, n, size)
        self.norm = RowNorm(tile[:count])
        self.row_norm = RowNorm(empty(count, size))
        # the row that they collapse into, also in a tile
        row_tile = np.zeros((ROW_TILE, size), dtype=np.float32)
        self.row_tile, self.row = tensor(row_tile), row_tile[:count]
        self.spread = empty(count, n, size)
        self.columns = empty((2 + n) * n, count)  # the tokens last
        self.columns_as_tensor = tensor(self.columns)
        self.gates = self.columns[: 2 * n]
        self.gate_columns, self.pre = self.gates.T, self.gates[:n].T[..., None]
        self.post = self.gates[n:].T
        self.sinkhorn = _Sinkhorn(self.columns[2 * n :].reshape(n, n, count))
        self.weighted = empty(count, n, size)
        self.weighted_terms = [self.weighted[:, stream] for stream in range(n)]

    def updated(self, streams: Tensor, update: Update) -> Tensor:
        """`mhc_update`; the tile also holds the result."""
        y = update.y.total() if isinstance(update.y, PartialSums) else update.y
        wide, spread = self.wide, self.spread
        of_all = streams.float().numpy()[:, :, None]
        np.multiply(update.comb.numpy()[..., None], of_all, self.products)
        mixed = _sum_into(self.terms)
        np.multiply(update.post.numpy()[..., None], y.float().numpy()[:, None], spread)
        np.add(spread, mixed, wide)
        if self.dtype == torch.float32:
            return tensor(wide.copy())
        streams = tensor(wide).to(self.dtype)
        np.copyto(wide, streams.float().numpy())
        return streams

    def logits(self, site: MixSite) -> Array:
        columns, row_scale, base, _ = site.arrays
        fits = len(columns) == self.tile.shape[1]  # or its sums need padding
        product = torch.mm(self.tile, columns) if fits else matmul_rows(self.tile, site.fn)
        logits: Array = product.numpy()[: self.count, : len(base)]
        logits *= self.norm.inverse_rms(site.eps)
        logits *= row_scale
        logits += base
        return logits

    def mixed(self, site: MixSite) -> tuple[Tensor, Tensor]:
        """post and comb of `mhc_pre` for the streams in the tile; its other result is in `row`."""
        columns, gates, matrix = self.columns, self.gates, self.sinkhorn.matrix
        np.copyto(columns.T, self.logits(site))
        np.negative(gates, gates)
        matrix -= np.maximum.reduce(matrix, 1, keepdims=True)
        self.columns_as_tensor.exp_()
        gates += ONE
        np.reciprocal(gates, gates)
        comb = self.sinkhorn.normalised(site.hc_eps, site.sinkhorn_iters)
        self.collapse(self.pre, site)
        return tensor(self.post * TWO), tensor(comb)

    def result(self) -> Tensor:
        return tensor(self.row.copy()).to(self.dtype)

    def collapse(self, weights: Array, site: MixSite) -> None:
        """One normalised row per token; `weights` `[tokens, streams, 1]`."""
        weights += fp32(site.hc_eps)
        np.multiply(self.wide, weights, self.weighted)
        mixed, dtype = _sum_into(self.weighted_terms), self.dtype
        if dtype == torch.float32:
            np.copyto(self.row_norm.rows, mixed)
        else:
            np.copyto(self.row_norm.rows, tensor(mixed).to(dtype).float().numpy())
        self.row_norm.write(site.arrays[3], site.eps, self.row)


def _sum_into(terms: list[Array]) -> Array:
    """Add in sequence, as torch does for up to four numbers; the first term is overwritten."""
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total


class _Sinkhorn:
    """`sinkhorn` of `matrix` `[source, destination, tokens]`, which already holds the exponentials
    of its softmax. A sum over the first axis adds whole rows in sequence, so every division writes
    its result transposed, and a last row of `eps` is added with the others."""

    def __init__(self, matrix: Array) -> None:
        n, _, count = matrix.shape
        self.matrix, self.n = matrix, n
        self.both = np.empty((2, n + 1, n, count), dtype=np.float32)
        self.one, self.other = self.both
        self.rows, self.other_rows = self.one[:n], self.other[:n]
        self.across, self.other_across = (
            rows.swapaxes(0, 1) for rows in (self.rows, self.other_rows)
        )
        self.total = np.empty((n, count), dtype=np.float32)

    def normalised(self, eps: float, iters: int) -> Array:
        """`[tokens, source, destination]`"""
        reduce: Any = np.add.reduce
        divide, total = np.divide, self.total
        one, other, rows, other_rows = self.one, self.other, self.rows, self.other_rows
        across, other_across = self.across, self.other_across
        self.both[:, self.n] = eps
        np.copyto(across, self.matrix)
        reduce(rows, 0, None, total)
        divide(rows, total, other_across)
        other_rows += fp32(eps)
        for _ in range(iters - 1):
            reduce(other, 0, None, total)
            divide(other_rows, total, across)
            reduce(one, 0, None, total)
            divide(rows, total, other_across)
        reduce(other, 0, None, total)
        result: Array = divide(other_rows, total)
        return result.transpose(2, 0, 1)
