"""Few rows on a CPU: the references' steps as calls of numpy, where the bits are certain to agree.

On small arrays a call costs more than its arithmetic, and one of numpy costs a third of one of
torch. Sums, differences, products, quotients and maxima of two fp32 numbers have one correct
result, so their bits agree wherever the order of additions does. Everything else (exp, rsqrt, sums
of many numbers, matrix products) stays the call of torch that the reference makes.
"""

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.core.rows import ROW_TILE

Array: TypeAlias = Any  # numpy.ndarray of float32 unless said otherwise
tensor = torch.from_numpy


@lru_cache(maxsize=256)
def fp32(value: float) -> Array:
    """A constant; with a Python number numpy takes twice as long."""
    return np.array([value], dtype=np.float32)


def sum_in_order(x: Array) -> Array:
    """Sum over the second axis, one after the other, as torch adds up to four numbers."""
    total = x[:, 0] + x[:, 1]
    for place in range(2, x.shape[1]):
        total += x[:, place]
    return total


def tile(x: Array) -> Array:
    """`x` with zero rows appended up to ROW_TILE, of which it has at most as many."""
    padded = np.zeros((ROW_TILE, x.shape[1]), dtype=np.float32)
    padded[: len(x)] = x
    return padded


def exp(x: Array) -> Array:
    """In place."""
    tensor(x).exp_()
    return x


def inverse_rms(x: Array, eps: float) -> Array:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis, which stays with size 1."""
    total = tensor(np.square(x)).sum(-1, keepdim=True)
    mean = total.numpy()
    mean /= fp32(x.shape[-1])
    mean += fp32(eps)
    total.rsqrt_()
    return mean


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Array:
    """`rms_norm` in fp32, before it is rounded to the dtype of x."""
    wide = x.float().numpy()
    out = wide * inverse_rms(wide, eps)
    if weight is not None:
        out *= weight.float().numpy()
    return out
