"""Batch invariance of the references: a row has the same bits in any batch.

A BLAS changes its order of summation with the number of rows. The references therefore multiply
exactly ROW_TILE rows at a time, the last tile padded with zeros; many tiles are one batched product
of equal parts. It also sums in another order where only a few columns are left: in a narrow matrix,
or behind the blocks of 16 columns that threads share. So their number is padded to a multiple of
COLUMN_TILE, and a column's bits do not depend on the others (ranks hold slices of a matrix). With
several threads MKL also divides the sum of a tile that is alone, unless its length is a multiple of
K_TILE or short; so it is padded, and the number of threads changes nothing. A row's result then
depends only on that row. Where a library changes its order depends on the CPU:
tests/ops/test_references.py tells whether these rules hold on yours.

torch's sigmoid, silu, softplus and softmax round the last few elements of a tensor differently from
the others; exp and log1p do not. So the former are built from the latter here.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

ROW_TILE = 8
COLUMN_TILE = 16
K_TILE = 256


def pad_rows(x: Tensor) -> Tensor:
    """`x` with zero rows appended up to a multiple of ROW_TILE."""
    missing = -x.shape[0] % ROW_TILE
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def is_whole(n: int, k: int) -> bool:
    """Whether a matrix `[n, k]` needs no padding."""
    return n % COLUMN_TILE == 0 and (k <= K_TILE // 2 or k % K_TILE == 0)


def pad_matrix(weight: Tensor) -> Tensor:
    """`weight` with zeros, so that it is whole."""
    n, k = weight.shape
    if is_whole(n, k):
        return weight
    return pad(weight, (0, -k % K_TILE if k > K_TILE // 2 else 0, 0, -n % COLUMN_TILE))


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 `x @ weight.T`, `[rows, k] x [n, k] -> [rows, n]`, independent for each row."""
    num_rows, num_columns = x.shape[0], weight.shape[0]
    weight = pad_matrix(weight.float())
    padded = pad_rows(pad(x.float(), (0, weight.shape[1] - x.shape[1])))
    if padded.shape[0] == ROW_TILE:
        product = linear(padded, weight)
    else:
        tiles = padded.reshape(-1, ROW_TILE, padded.shape[1])
        product = torch.bmm(tiles, weight.t().expand(tiles.shape[0], -1, -1)).flatten(0, 1)
    whole = product.shape == (num_rows, num_columns)
    return product if whole else product[:num_rows, :num_columns]


def sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def softmax(x: Tensor, dim: int) -> Tensor:
    weights = torch.exp(x - x.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)
