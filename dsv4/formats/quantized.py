"""Weights that carry their number format. Leading axes (stacked experts) are optional.

`shape` is the logical, unpacked shape [..., N, K]. Nothing here changes a value: slicing follows
the blocks, `dequantize` is exact up to one float32 rounding and the final cast.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import ceil, gcd
from typing import Self

import torch

from dsv4.errors import KernelError
from dsv4.formats import fp8, mxfp4, nvfp4
from dsv4.formats.spec import MXFP4_GROUP, NVFP4_GROUP, Activations


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """Shared by all formats: iteration over their tensors, and the activation precision.

    `activations`: what a product rounds its input to: nothing, FP8 or NVFP4 rows.

    A rank may hold only some rows, but sums along K in the order of the whole matrix:
    `whole_rows`: rows of the whole matrix (0: this one); kernels derive their K split from it.
    `k_ranges`: K is summed in this many equal ranges, in the references too (0: kernels choose).
    """

    activations: Activations = "a16"
    whole_rows: int = 0
    k_ranges: int = 0

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        pairs = ((item.name, getattr(self, item.name)) for item in fields(self))
        return [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A copy with `change` applied to each tensor."""
        changed = {name: change(value) for name, value in self._tensors()}
        return replace(self, **changed)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self._tensors()[0][1].device

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for _, value in self._tensors())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self.map(lambda value: value.to(device, non_blocking=non_blocking))

    def __getitem__(self, index: int | slice) -> Self:
        """Experts of a stack."""
        if self._tensors()[0][1].dim() < 3:
            raise KernelError("indexing needs a leading axis (stacked experts); this is a matrix")
        return self.map(lambda value: value[index])


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(message)


@dataclass(frozen=True)
class Nvfp4Tensor(PackedWeight):
    """`packed` uint8 [..., N, K/2], `scale` E4M3 [..., N, K/16], `global_scale` float32 [..., P].

    The N rows are cut into P equal parts; part p is multiplied by global_scale[..., p]. P is 2
    for a joined w1 and w3 whose globals differ.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self) -> None:
        p, s, g = self.packed, self.scale, self.global_scale
        _need(
            p.dtype == torch.uint8 and s.dtype == torch.float8_e4m3fn and g.dtype == torch.float32,
            f"NVFP4 parts are {p.dtype}, {s.dtype}, {g.dtype}; expected uint8, float8_e4m3fn, "
            "float32",
        )
        _need(
            p.dim() >= 2
            and s.shape == (*p.shape[:-1], p.shape[-1] * 2 // NVFP4_GROUP)
            and p.shape[-1] * 2 % NVFP4_GROUP == 0
            and g.shape[:-1] == p.shape[:-2]
            and g.dim() == p.dim() - 1
            and p.shape[-2] % max(g.shape[-1], 1) == 0,
            f"NVFP4 shapes packed {tuple(p.shape)}, scale {tuple(s.shape)}, global "
            f"{tuple(g.shape)} do not fit [..., N, K/2], [..., N, K/16], [..., P]",
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return nvfp4.dequantize(self.packed, self.scale, self.global_scale, dtype)

    def row_range(self, start: int, stop: int) -> "Nvfp4Tensor":
        """Rows start:stop; with several globals each part must get the same number of rows."""
        num_parts = self.global_scale.shape[-1]
        part_rows = self.shape[-2] // num_parts
        first, last = start // part_rows, ceil(stop / part_rows)
        whole = start % part_rows == 0 and stop % part_rows == 0
        _need(
            last - first == 1 or whole,
            f"rows {start}:{stop} cut through parts of {part_rows} rows with different globals",
        )
        return replace(
            self,
            packed=self.packed[..., start:stop, :],
            scale=self.scale[..., start:stop, :],
            global_scale=self.global_scale[..., first:last],
        )

    def column_range(self, start: int, stop: int) -> "Nvfp4Tensor":
        _need(start % NVFP4_GROUP == 0 and stop % NVFP4_GROUP == 0, _columns("NVFP4", start, stop))
        return replace(
            self,
            packed=self.packed[..., start // 2 : stop // 2],
            scale=self.scale[..., start // NVFP4_GROUP : stop // NVFP4_GROUP],
        )


@dataclass(frozen=True)
class Mxfp4Tensor(PackedWeight):
    """`packed` uint8 [..., N, K/2], `scale` E8M0 bytes (uint8) [..., N, K/32]."""

    packed: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        p, s = self.packed, self.scale
        _need(
            p.dtype == torch.uint8 and s.dtype == torch.uint8,
            f"MXFP4 parts are {p.dtype} and {s.dtype}; expected the bytes as uint8",
        )
        _need(
            p.dim() >= 2
            and p.shape[-1] * 2 % MXFP4_GROUP == 0
            and s.shape == (*p.shape[:-1], p.shape[-1] * 2 // MXFP4_GROUP),
            f"MXFP4 shapes packed {tuple(p.shape)}, scale {tuple(s.shape)} do not fit "
            "[..., N, K/2], [..., N, K/32]",
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * 2))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return mxfp4.dequantize(self.packed, self.scale, dtype)

    def row_range(self, start: int, stop: int) -> "Mxfp4Tensor":
        return self.map(lambda value: value[..., start:stop, :])

    def column_range(self, start: int, stop: int) -> "Mxfp4Tensor":
        _need(start % MXFP4_GROUP == 0 and stop % MXFP4_GROUP == 0, _columns("MXFP4", start, stop))
        return replace(
            self,
            packed=self.packed[..., start // 2 : stop // 2],
            scale=self.scale[..., start // MXFP4_GROUP : stop // MXFP4_GROUP],
        )


@dataclass(frozen=True)
class Fp8BlockTensor(PackedWeight):
    """`data` E4M3 [..., N, K], `scale` float32 or E8M0 bytes [..., ceil(N/R), ceil(K/B)].

    A tile has `block` columns (B) and `block_rows` rows (R), by default the same number.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: int
    block_rows: int | None = None

    def __post_init__(self) -> None:
        d, s = self.data, self.scale
        _need(
            d.dtype == torch.float8_e4m3fn and s.dtype in (torch.uint8, torch.float32),
            f"FP8 parts are {d.dtype} and {s.dtype}; expected float8_e4m3fn and float32 or uint8",
        )
        rows, cols = self.tile
        _need(min(rows, cols) >= 1, f"FP8 tile is {rows} x {cols}, expected 1 or more")
        _need(
            d.dim() >= 2
            and s.shape == (*d.shape[:-2], ceil(d.shape[-2] / rows), ceil(d.shape[-1] / cols)),
            f"FP8 shapes data {tuple(d.shape)}, scale {tuple(s.shape)} do not fit tiles of "
            f"{rows} x {cols}",
        )

    @property
    def tile(self) -> tuple[int, int]:
        return self.block if self.block_rows is None else self.block_rows, self.block

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return fp8.dequantize_tiles(self.data, self.scale, self.tile, dtype)

    def refine(self, rows: int, cols: int) -> "Fp8BlockTensor":
        """The same values with smaller tiles (divisors of the old ones): scales are repeated."""
        scale = self.scale
        for dim, old, new in zip((-2, -1), self.tile, (rows, cols), strict=True):
            _need(old % new == 0, f"tiles of {old} cannot be cut into {new}")
            scale = scale.repeat_interleave(old // new, dim=dim)
            scale = scale.narrow(dim, 0, ceil(self.shape[dim] / new))
        return replace(self, scale=scale, block=cols, block_rows=rows)

    def row_range(self, start: int, stop: int) -> "Fp8BlockTensor":
        """Rows start:stop; a cut inside a tile refines the tiles first."""
        rows = _tile_for(self.tile[0], start, stop, self.shape[-2])
        w = self if rows == self.tile[0] else self.refine(rows, self.block)
        tiles = slice(start // rows, ceil(stop / rows))
        return replace(w, data=w.data[..., start:stop, :], scale=w.scale[..., tiles, :])

    def column_range(self, start: int, stop: int) -> "Fp8BlockTensor":
        rows = self.tile[0]
        cols = _tile_for(self.block, start, stop, self.shape[-1])
        w = self if cols == self.block else self.refine(rows, cols)
        tiles = slice(start // cols, ceil(stop / cols))
        return replace(w, data=w.data[..., start:stop], scale=w.scale[..., tiles])


def _tile_for(tile: int, start: int, stop: int, size: int) -> int:
    """Only the start must be on a tile edge: the last tile of the slice may be short."""
    _need(0 <= start <= stop <= size, f"range {start}:{stop} is outside 0:{size}")
    return gcd(start, tile) if start else tile


def _columns(name: str, start: int, stop: int) -> str:
    return f"columns {start}:{stop} cut through a block of {name}; cut at block edges"


@dataclass(frozen=True)
class UnpackedTensor(PackedWeight):
    """`values` [..., N, K]: a weight unpacked once for the references."""

    values: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.values.to(dtype)

    def row_range(self, start: int, stop: int) -> "UnpackedTensor":
        return self.map(lambda value: value[..., start:stop, :])

    def column_range(self, start: int, stop: int) -> "UnpackedTensor":
        return self.map(lambda value: value[..., start:stop])


class RepackedTensor(PackedWeight, ABC):
    """A weight in a kernel's memory order; slice it before repacking."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor: ...

    def row_range(self, start: int, stop: int) -> Self:
        raise KernelError(f"rows {start}:{stop} of a repacked weight: cut weights before that")

    def column_range(self, start: int, stop: int) -> Self:
        raise KernelError(f"columns {start}:{stop} of a repacked weight: cut weights before that")


QuantizedTensor = Nvfp4Tensor | Mxfp4Tensor | Fp8BlockTensor
StoredWeight = torch.Tensor | QuantizedTensor  # as stored on disk
Weight = StoredWeight | UnpackedTensor | RepackedTensor


def activations_of(weight: Weight) -> Activations:
    """A plain tensor's input is never rounded."""
    return "a16" if isinstance(weight, torch.Tensor) else weight.activations


def k_ranges_of(weight: Weight) -> int:
    """Number of equal K ranges that are summed separately; 1 unless the weight sets it."""
    return 1 if isinstance(weight, torch.Tensor) else max(1, weight.k_ranges)


def part_of_whole(weight: Weight, whole_rows: int, k_ranges: int = 0) -> Weight:
    """`weight` with the whole matrix's order of summation; a plain tensor that is the whole matrix
    stays as it is."""
    if not isinstance(weight, torch.Tensor):
        return replace(weight, whole_rows=whole_rows, k_ranges=k_ranges)
    if weight.shape[0] == whole_rows and k_ranges <= 1:
        return weight
    return UnpackedTensor(weight, whole_rows=whole_rows, k_ranges=k_ranges)
