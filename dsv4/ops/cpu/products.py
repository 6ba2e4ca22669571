"""Products and norms of few rows on a CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.formats.quantized import Weight, activations_of, k_ranges_of
from dsv4.ops.core.rows import ROW_TILE, matmul_rows
from dsv4.ops.cpu.arrays import normed, tensor, tile
from dsv4.ops.gemm.grouped_linear import grouped_linear_reference
from dsv4.ops.gemm.linear import dense, linear_reference
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.norm.rms_norm import rms_norm_reference


def linear(x: Tensor, weights: Sequence[Weight], out_dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    count = x.shape[0]
    if count > ROW_TILE:
        return linear_reference(x, weights, out_dtypes)
    tiles: dict[str, Tensor] = {}
    results = []
    for weight, dtype in zip(weights, out_dtypes, strict=True):
        width = activations_of(weight)
        if width not in tiles:
            tiles[width] = tensor(tile(rounded(x, width).float().numpy()))
        product = _product(tiles[width], weight)[:count]
        results.append(product if dtype == torch.float32 else product.to(dtype))
    return results


def _product(x: Tensor, weight: Weight) -> Tensor:
    ranges, values = k_ranges_of(weight), dense(weight)
    if ranges == 1:
        return matmul_rows(x, values)
    size, total = weight.shape[1] // ranges, torch.zeros(())
    for first in range(0, weight.shape[1], size):
        own = slice(first, first + size)
        total = total + matmul_rows(x[:, own].contiguous(), values[:, own])
    return total


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    count, num_groups = x.shape[:2]
    if count > ROW_TILE:
        return grouped_linear_reference(x, weight)
    values, rank = dense(weight), weight.shape[0] // num_groups
    rows = rounded(x, activations_of(weight)).float().numpy()
    outputs = np.empty((count, weight.shape[0]), dtype=np.float32)
    for group in range(num_groups):
        own = slice(group * rank, (group + 1) * rank)
        outputs[:, own] = matmul_rows(tensor(tile(rows[:, group])), values[own]).numpy()[:count]
    return tensor(outputs).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if x.shape[0] > ROW_TILE:
        return rms_norm_reference(x, weight, eps)
    return tensor(normed(x, weight, eps)).to(x.dtype)
