"""Batch invariance of the references: a row has the same bits in any batch.

A BLAS changes its order of summation with the number of rows. The references therefore multiply
exactly ROW_TILE rows at a time, the last tile padded with zeros; many tiles are one batched product
of equal parts. With very few columns the order also depends on a row's place in its tile, so there
are at least MIN_COLUMNS of them. With several threads MKL also divides the sum of a tile that is
alone, unless its length is a multiple of K_TILE or short; so it is padded, and the number of
threads changes nothing. A row's result then depends only on that row.

torch's sigmoid, silu, softplus and softmax round the last few elements of a tensor differently from
the others; exp and log1p do not. So the former are built from the latter here.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

ROW_TILE = 8
MIN_COLUMNS = 8
K_TILE = 256


def pad_rows(x: Tensor) -> Tensor:
    """`x` with zero rows appended up to a multiple of ROW_TILE."""
    missing = -x.shape[0] % ROW_TILE
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def is_even(k: int) -> bool:
    """Whether sums of `k` products need no padding."""
    return k <= K_TILE // 2 or k % K_TILE == 0


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 `x @ weight.T`, `[rows, k] x [n, k] -> [rows, n]`, independent for each row."""
    num_rows, num_columns = x.shape[0], weight.shape[0]
    weight = weight.float()
    if num_columns < MIN_COLUMNS:
        missing = MIN_COLUMNS - num_columns
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
        return matmul_rows(x, weight)[:, :num_columns]
    if not is_even(x.shape[1]):
        x, weight = (pad(t.float(), (0, -t.shape[1] % K_TILE)) for t in (x, weight))
    padded = pad_rows(x.float())
    if padded.shape[0] == ROW_TILE:
        product = linear(padded, weight)
    else:
        tiles = padded.reshape(-1, ROW_TILE, padded.shape[1])
        product = torch.bmm(tiles, weight.t().expand(tiles.shape[0], -1, -1)).flatten(0, 1)
    return product if product.shape[0] == num_rows else product[:num_rows]


def sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def softmax(x: Tensor, dim: int) -> Tensor:
    weights = torch.exp(x - x.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)
