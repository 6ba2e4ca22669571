"""Products and norms of few rows on a CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.formats.quantized import UnpackedTensor, Weight, activations_of, k_ranges_of
from dsv4.ops.core.batch_invariance import ROW_TILE, matmul_rows, padding
from dsv4.ops.cpu.arrays import fp32, normed, tensor, tile
from dsv4.ops.gemm.grouped_linear import grouped_linear_reference
from dsv4.ops.gemm.linear import dense, linear_reference
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.norm.rms_norm import rms_norm_reference


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`matmul_rows` of a whole tile: the same product with less overhead."""
    if any(padding(*weight.shape)) or weight.dtype != torch.float32:
        return matmul_rows(x, weight)
    return torch.mm(x, weight.t())


def plain(weight: Weight) -> Tensor | None:
    """The values of an fp32 weight, or None, also if it rounds its input or splits K."""
    if isinstance(weight, UnpackedTensor):
        is_plain = weight.activations == "a16" and weight.k_ranges <= 1
        weight = weight.values if is_plain else weight
    is_fp32 = isinstance(weight, Tensor) and weight.dtype == torch.float32
    return weight if is_fp32 else None  # type: ignore[return-value]


def as_multiplied(x: Tensor, width: str) -> Tensor:
    """The rows of `x` in a tile, rounded to activations of that width."""
    if width != "a16":
        x = rounded(x, width)  # type: ignore[arg-type]
    return tensor(tile(x.float().numpy()))


def linear(x: Tensor, weights: Sequence[Weight], out_dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    count = x.shape[0]
    if count > ROW_TILE:
        return linear_reference(x, weights, out_dtypes)
    tiles: dict[str, Tensor] = {}
    results = []
    for weight, dtype in zip(weights, out_dtypes, strict=True):
        width = activations_of(weight)
        rows = tiles.get(width)
        if rows is None:
            rows = tiles[width] = as_multiplied(x, width)
        product = _product(rows, weight)[:count]
        results.append(product if dtype == torch.float32 else product.to(dtype))
    return results


def _product(x: Tensor, weight: Weight) -> Tensor:
    values = weight.values if isinstance(weight, UnpackedTensor) else dense(weight)
    ranges = k_ranges_of(weight)
    if ranges == 1:
        return multiply(x, values)
    size, total = weight.shape[1] // ranges, fp32(0.0)
    for first in range(0, weight.shape[1], size):
        own = slice(first, first + size)
        total = total + multiply(x[:, own].contiguous(), values[:, own]).numpy()
    return tensor(total)


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    count, num_groups = x.shape[:2]
    if count > ROW_TILE:
        return grouped_linear_reference(x, weight)
    width, rank = activations_of(weight), weight.shape[0] // num_groups
    rows = (x if width == "a16" else rounded(x, width)).float().numpy()
    outputs = np.empty((count, weight.shape[0]), dtype=np.float32)
    values = dense(weight)
    for group in range(num_groups):
        own = slice(group * rank, (group + 1) * rank)
        outputs[:, own] = multiply(tensor(tile(rows[:, group])), values[own]).numpy()[:count]
    return tensor(outputs).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if x.shape[0] > ROW_TILE:
        return rms_norm_reference(x, weight, eps)
    return tensor(normed(x, weight, eps)).to(x.dtype)
