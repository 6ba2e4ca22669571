"""Few rows on a CPU: the references' steps as numpy calls, where the bits are certain to agree.

On small arrays a call costs more than its arithmetic, and a numpy call costs a third of a torch
call. Sums, differences, products, quotients and maxima of two fp32 numbers have one correct result,
so their bits agree wherever the order of additions does. Everything else (exp, rsqrt, sums of many
numbers, matrix products) stays the torch call that the reference makes.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.core.batch_invariance import ROW_TILE
from dsv4.ops.core.context import current

Array: TypeAlias = Any  # numpy.ndarray of float32 unless noted otherwise
T = TypeVar("T")
tensor = torch.from_numpy


@lru_cache(maxsize=256)
def fp32(value: float) -> Array:
    """A constant as an array; numpy takes twice as long with a Python number."""
    return np.array([value], dtype=np.float32)


def tile(x: Array) -> Array:
    """`x`, which has at most ROW_TILE rows, padded with zero rows to ROW_TILE."""
    padded = np.zeros((ROW_TILE, x.shape[1]), dtype=np.float32)
    padded[: len(x)] = x
    return padded


def exp(x: Array) -> Array:
    """In place."""
    tensor(x).exp_()
    return x


def inverse_rms(x: Array, eps: float) -> Array:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis, which is kept with size 1."""
    total = tensor(np.square(x)).sum(-1, keepdim=True)
    mean = total.numpy()
    mean /= fp32(x.shape[-1])
    mean += fp32(eps)
    total.rsqrt_()
    return mean


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Array:
    """`rms_norm` in fp32, not yet rounded to the dtype of x."""
    wide = x.float().numpy()
    out = wide * inverse_rms(wide, eps)
    if weight is not None:
        out *= weight.float().numpy()
    return out


class RowNorm:
    """`rms_norm` of `rows`, which the caller fills; arrays and their views are made once."""

    def __init__(self, rows: Array) -> None:
        self.rows, self.size = rows, fp32(rows.shape[1])
        self.squares = np.empty_like(rows)
        self.squares_as_tensor = tensor(self.squares)
        self.mean = np.empty((len(rows), 1), dtype=np.float32)
        self.mean_as_tensor = tensor(self.mean)

    def inverse_rms(self, eps: float) -> Array:
        """`1 / sqrt(mean(x^2) + eps)`, `[rows, 1]`; overwritten by the next call."""
        mean = self.mean
        np.square(self.rows, self.squares)
        torch.sum(self.squares_as_tensor, 1, True, out=self.mean_as_tensor)
        mean /= self.size
        mean += fp32(eps)
        self.mean_as_tensor.rsqrt_()
        return mean

    def write(self, weight: Array | None, eps: float, out: Array) -> None:
        """Write the result to `out` in fp32, not yet rounded to the dtype of the rows."""
        np.multiply(self.rows, self.inverse_rms(eps), out)
        if weight is not None:
            out *= weight


class NormScratch(RowNorm):
    """A `RowNorm` with a tile for the result; the tile's other rows stay zero."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(np.empty((count, size), dtype=np.float32))
        whole = np.zeros((max(count, ROW_TILE), size), dtype=np.float32)
        self.tile, self.out = tensor(whole), whole[:count]

    def __call__(self, weight: Tensor | None, eps: float) -> None:
        self.write(None if weight is None else weight.float().numpy(), eps, self.out)


def kept(key: tuple[object, ...], make: Callable[[], T]) -> T:
    """Scratch that the engine reuses, by thread; inference mode has its own, as its tensors
    differ."""
    of_thread: dict[Any, T] = current().engine.scratch.__dict__
    key = (*key, torch.is_inference_mode_enabled())
    found = of_thread.get(key)
    if found is None:
        found = of_thread[key] = make()
    return found


def norm_scratch(name: str, count: int, size: int) -> NormScratch:
    return kept((name, count, size), lambda: NormScratch(count, size))
