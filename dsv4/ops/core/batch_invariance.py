"""Batch invariance of the references: a row has the same bits in any batch.

A BLAS changes its order of summation with the number of rows. The references therefore multiply
exactly ROW_TILE rows at a time, the last tile padded with zeros; many tiles are one batched product
of equal parts. Few columns, in a narrow matrix or behind the blocks of 16 that threads share, are
summed in another order too. So they are padded to a multiple of COLUMN_TILE, and no column's bits
depend on the others (ranks hold slices of a matrix). MKL with several threads divides the sum of a
lone tile, unless it is short or a multiple of K_TILE long; so it is padded too. Rows one after the
other are summed in another order than columns one after the other, so a padded matrix keeps its
own. All this depends on the CPU: tests/ops/test_references.py shows it. On Intel's, MKL has a mode
that keeps bits with any number of threads and any size of blocks (MKL_CBWR). It is read at the
first product of a process, so this file must be imported before that.

torch's sigmoid, silu, softplus and softmax round the last few elements of a tensor differently from
the others; exp and log1p do not. So the former are built from the latter here.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

ROW_TILE = 8
COLUMN_TILE = 16
K_TILE = 256


def is_intel() -> bool:
    found = Path("/proc/cpuinfo")
    if not found.exists():  # not Linux
        return False
    with found.open(encoding="utf-8", errors="replace") as file:
        return "GenuineIntel" in file.read(1000)


if is_intel():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def pad_rows(x: Tensor) -> Tensor:
    """`x` with zero rows appended up to a multiple of ROW_TILE."""
    missing = -x.shape[0] % ROW_TILE
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def padding(n: int, k: int) -> tuple[int, int, int, int]:
    """What a matrix `[n, k]` lacks, as torch's `pad` takes it."""
    return 0, -k % K_TILE if k > K_TILE // 2 else 0, 0, -n % COLUMN_TILE


def pad_matrix(weight: Tensor) -> Tensor:
    missing = padding(*weight.shape)
    if not any(missing):
        return weight
    if weight.stride(0) == 1:
        return pad(weight.mT, missing[2:] + missing[:2]).mT
    return pad(weight, missing)


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 `x @ weight.T`, `[rows, k] x [n, k] -> [rows, n]`, independent for each row."""
    num_rows, num_columns = x.shape[0], weight.shape[0]
    weight = pad_matrix(weight.float())
    missing = (0, weight.shape[1] - x.shape[1], 0, -num_rows % ROW_TILE)
    padded = pad(x.float(), missing) if any(missing) else x.float()
    if padded.shape[0] == ROW_TILE:
        product = linear(padded, weight)
    else:
        tiles = padded.reshape(-1, ROW_TILE, padded.shape[1])
        product = torch.bmm(tiles, weight.t().expand(tiles.shape[0], -1, -1)).flatten(0, 1)
    return product[:num_rows, :num_columns]


def sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def softmax(x: Tensor, dim: int) -> Tensor:
    weights = torch.exp(x - x.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)
