"""`mhc_pre`, `mhc_boundary` and `mhc_head` of few rows on a CPU."""

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.core.rows import ROW_TILE, matmul_rows
from dsv4.ops.cpu.arrays import Array, exp, fp32, inverse_rms, normed, sum_in_order, tensor, tile
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.mhc.mix import (
    MixSite,
    mhc_boundary_reference,
    mhc_head_reference,
    mhc_pre_reference,
)

MOST_STREAMS = 4  # torch adds more numbers in another order


def mhc_pre(streams: Tensor, site: MixSite) -> tuple[Tensor, Tensor, Tensor]:
    if not _few(streams):
        return mhc_pre_reference(streams, site)
    return _mixed(_tile(streams), streams, site)


def mhc_boundary(
    streams: Tensor, y: Tensor | PartialSums, post: Tensor, comb: Tensor, site: MixSite
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _few(streams):
        return mhc_boundary_reference(streams, y, post, comb, site)
    padded, streams = _updated(streams, y, post, comb)
    return (streams, *_mixed(padded, streams, site))


def mhc_head(
    streams: Tensor, y: Tensor | PartialSums, post: Tensor, comb: Tensor, site: MixSite
) -> Tensor:
    if not _few(streams):
        return mhc_head_reference(streams, y, post, comb, site)
    padded, streams = _updated(streams, y, post, comb)
    weights = _sigmoid(exp(-_logits(padded, streams, site)))
    return _collapsed(padded, streams, weights, site)


def _few(streams: Tensor) -> bool:
    count, n, _ = streams.shape
    return 0 < count <= ROW_TILE and 1 < n <= MOST_STREAMS


def _tile(streams: Tensor) -> Array:
    """fp32 `[ROW_TILE, streams * size]`."""
    return tile(streams.float().numpy().reshape(len(streams), -1))


def _updated(
    streams: Tensor, y: Tensor | PartialSums, post: Tensor, comb: Tensor
) -> tuple[Array, Tensor]:
    """The tile of the streams after `mhc_update`, and these."""
    y = y.total() if isinstance(y, PartialSums) else y
    dtype, shape = streams.dtype, streams.shape
    mixed = sum_in_order(comb.numpy()[..., None] * streams.float().numpy()[:, :, None])
    padded = np.zeros((ROW_TILE, shape[1] * shape[2]), dtype=np.float32)
    wide = padded[: shape[0]].reshape(shape)
    np.add(post.numpy()[..., None] * y.float().numpy()[:, None], mixed, wide)
    streams = tensor(wide)
    if dtype != torch.float32:
        streams = streams.to(dtype)
        wide[:] = streams.float().numpy()
    return padded, streams


def _logits(padded: Array, streams: Tensor, site: MixSite) -> Array:
    count = len(streams)
    logits = matmul_rows(tensor(padded), site.fn).numpy()[:count]
    logits *= inverse_rms(padded[:count], site.eps)
    logits *= site.row_scale.numpy()
    logits += site.base.numpy()
    return logits


def _mixed(padded: Array, streams: Tensor, site: MixSite) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `mhc_pre`."""
    count, n, _ = streams.shape
    exps = _logits(padded, streams, site).T.copy()  # the tokens last
    gates, matrix = exps[: 2 * n], exps[2 * n :].reshape(n, n, count)
    np.negative(gates, gates)
    matrix -= matrix.max(1, keepdims=True)
    exp(exps)
    gates = _sigmoid(gates.T)
    comb = _normalise(matrix, site.hc_eps, site.sinkhorn_iters).transpose(2, 0, 1)
    x = _collapsed(padded, streams, gates[:, :n], site)
    return x, tensor(gates[:, n:] * fp32(2.0)), tensor(comb)


def _sigmoid(exp_of_negative: Array) -> Array:
    return np.reciprocal(exp_of_negative + fp32(1.0))


def _collapsed(padded: Array, streams: Tensor, weights: Array, site: MixSite) -> Tensor:
    wide, dtype = padded[: len(streams)].reshape(streams.shape), streams.dtype
    mixed = sum_in_order(wide * (weights + fp32(site.hc_eps))[..., None])
    return tensor(normed(tensor(mixed).to(dtype), site.norm, site.eps)).to(dtype)


def _normalise(matrix: Array, eps: float, iters: int) -> Array:
    """`sinkhorn` of `[source, destination, tokens]`, once the exponentials of its softmax are
    taken. A sum over the first axis adds whole rows, one after the other; so the matrix is
    transposed between the two kinds of sums."""
    add, divide, reduce, least = np.add, np.divide, np.add.reduce, fp32(eps)
    other, total = np.empty_like(matrix), np.empty_like(matrix[0])
    across, other_across = matrix.swapaxes(0, 1), other.swapaxes(0, 1)
    np.copyto(other, across)
    reduce(other, 0, None, total)
    divide(other, total, other)
    add(other, least, other)
    np.copyto(matrix, other_across)
    for half in range(2 * iters - 1):
        if half:
            matrix, other, across, other_across = other, matrix, other_across, across
            np.copyto(matrix, other_across)
        reduce(matrix, 0, None, total)
        add(total, least, total)
        divide(matrix, total, matrix)
    return matrix
