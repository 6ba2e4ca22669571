"""Weights in the order that block-scaled tensor cores read (sm_100). Repacked once, at load.

    data    uint8  [..., Np, bytes]        two E2M1 (low nibble first) or one E4M3 per byte
    scale   uint8  [..., Np/128, Kp/(4 group), 2, 256]   E4M3 per 16 columns, or E8M0 per 32

Np is N rounded up to a multiple of 128, Kp is K rounded up to a multiple of 256; padding is zero.
The scales of 128 rows and 4 groups are 512 contiguous bytes in the hardware's order: `row % 32`,
`row // 32`, `group % 4`, slowest first. No value changes:

    NVFP4 x a4   as stored
    MXFP4 x a8   as stored; NVFP4 if each pair of blocks has the same power-of-two scale
    FP8   x a8   tiles with power-of-two scales, repeated for each row and 32 columns
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.formats import e2m1, e8m0, fp8, mxfp4
from dsv4.formats.groups import expand
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, RepackedTensor
from dsv4.formats.spec import FP8_BLOCK, MXFP4_GROUP, NVFP4_GROUP, Activations
from dsv4.ops.gemm.weights.tiled import quantized_parts

ROWS = 128  # of a scale tile, and of the tensor core's M
COLUMN_MULTIPLE = 256


@dataclass(frozen=True)
class ScaledTensor(RepackedTensor):
    """`data` and `scale` as described above; `global_scale` float32 [..., P], as in NVFP4."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor
    rows: int
    columns: int
    group: int  # columns that share a scale: 16 (E4M3) or 32 (E8M0)
    element_bits: int  # 4: E2M1, 8: E4M3

    def __post_init__(self) -> None:
        rows, columns = padded(self.rows, self.columns)
        lead = self.data.shape[:-2]
        grid = (rows // ROWS, columns // self.group // 4, 2, 256)
        if (
            self.data.shape != (*lead, rows, columns * self.element_bits // 8)
            or self.scale.shape != (*lead, *grid)
            or {self.data.dtype, self.scale.dtype} != {torch.uint8}
            or self.global_scale.shape[:-1] != lead
            or self.rows % self.global_scale.shape[-1]
        ):
            raise KernelError(
                f"scaled parts {self.data.dtype} {tuple(self.data.shape)}, {self.scale.dtype} "
                f"{tuple(self.scale.shape)}, global {tuple(self.global_scale.shape)} do not fit "
                f"{self.rows} x {self.columns}"
            )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.data.shape[:-2], self.rows, self.columns))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.element_bits == 4:
            values = e2m1.decode_packed(self.data)
        else:
            values = self.data.view(torch.float8_e4m3fn).float()
        factor = untile_scales(self.scale)
        is_e8m0 = self.group == MXFP4_GROUP
        factor = e8m0.decode(factor) if is_e8m0 else factor.view(torch.float8_e4m3fn).float()
        values = values * expand(factor, self.group, values.shape[-1])
        values = values[..., : self.rows, : self.columns]
        global_ = self.global_scale.repeat_interleave(
            self.rows // self.global_scale.shape[-1], dim=-1
        )
        return (values * global_[..., None]).to(dtype)


def padded(rows: int, columns: int) -> tuple[int, int]:
    return ceil(rows / ROWS) * ROWS, ceil(columns / COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def tile_scales(scale: Tensor) -> Tensor:
    """`[..., Np, groups]` bytes, both multiples -> `[..., Np/128, groups/4, 2, 256]`."""
    *lead, rows, groups = scale.shape
    grid = scale.reshape(-1, rows // ROWS, 4, 32, groups // 4, 4)
    grid = grid.permute(0, 1, 4, 3, 2, 5)  # row tile, group tile, row % 32, row // 32, group % 4
    return grid.reshape(*lead, rows // ROWS, groups // 4, 2, 256)


def untile_scales(tiles: Tensor) -> Tensor:
    *lead, row_tiles, group_tiles, _, _ = tiles.shape
    grid = tiles.reshape(-1, row_tiles, group_tiles, 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    return grid.reshape(*lead, row_tiles * ROWS, group_tiles * 4)


def scaled_weight(weight: Nvfp4Tensor | Mxfp4Tensor | Fp8BlockTensor) -> ScaledTensor | str:
    """`weight` repacked for its `activations`, or why that cannot be exact."""
    rows, columns = weight.shape[-2:]
    width = weight.activations
    if isinstance(weight, Nvfp4Tensor) and width == "a4":
        scale = weight.scale.view(torch.uint8)
        return _scaled(weight.packed, scale, weight.global_scale, rows, columns, width)
    if width != "a8":
        return f"{type(weight).__name__} has no products with {width} activations"
    lead = weight.shape[:-2]
    if isinstance(weight, Nvfp4Tensor):
        found = _power_of_two_pairs(weight.scale)
        if found is None:
            return "NVFP4 block scales are not pairs of equal powers of two, as MXFP4 needs"
        return _scaled(weight.packed, found, weight.global_scale, rows, columns, width)
    ones = torch.ones(*lead, 1, dtype=torch.float32, device=weight.device)
    if isinstance(weight, Mxfp4Tensor):
        return _scaled(weight.packed, weight.scale, ones, rows, columns, width)
    if weight.scale.dtype != torch.uint8 or weight.block % MXFP4_GROUP:
        return f"FP8 tiles of {weight.block} with {weight.scale.dtype} scales are not MXFP8"
    scale = weight.refine(1, MXFP4_GROUP).scale
    return _scaled(weight.data.view(torch.uint8), scale, ones, rows, columns, width)


def random_scaled(
    rows: int,
    columns: int,
    generator: torch.Generator,
    kind: str = "nvfp4",
    *,
    count: int = 0,
    num_parts: int = 1,
) -> ScaledTensor:
    """A random matrix, or `count` of them stacked, for cases: nvfp4 x a4, or mxfp4 or fp8 x a8."""
    shape = (max(count, 1) * num_parts, rows // num_parts, columns)
    values = torch.randn(shape, generator=generator) * 0.2
    lead = (count, rows) if count else (rows,)
    weight: Nvfp4Tensor | Mxfp4Tensor | Fp8BlockTensor
    if kind == "nvfp4":
        parts = (value * (1 + i % num_parts) for i, value in enumerate(values))
        weight = replace(quantized_parts(parts, lead, num_parts), activations="a4")
    elif kind == "mxfp4":
        weight = Mxfp4Tensor(*mxfp4.quantize(values.reshape(*lead, columns)), activations="a8")
    else:
        tiles = fp8.quantize_tiles(values.reshape(*lead, columns))
        weight = Fp8BlockTensor(*tiles, FP8_BLOCK, activations="a8")
    found = scaled_weight(weight)
    if isinstance(found, str):
        raise KernelError(found)
    return found


def _scaled(
    data: Tensor, scale: Tensor, global_: Tensor, rows: int, columns: int, width: Activations
) -> ScaledTensor:
    group = NVFP4_GROUP if width == "a4" else MXFP4_GROUP
    bits = 8 * data.shape[-1] // columns
    all_rows, all_columns = padded(rows, columns)
    data = _pad(data, all_rows, all_columns * bits // 8)
    # padding scales cover zeros; byte 0 would still be a legal power of two
    scale = tile_scales(_pad(scale, all_rows, all_columns // group))
    parts = (data.contiguous(), scale.contiguous(), global_.contiguous())
    return ScaledTensor(*parts, rows, columns, group, bits, activations=width)


def _pad(value: Tensor, rows: int, columns: int) -> Tensor:
    short = (0, columns - value.shape[-1], 0, rows - value.shape[-2])
    return torch.nn.functional.pad(value, short) if any(short) else value


def _power_of_two_pairs(scale: Tensor) -> Tensor | None:
    """E4M3 scales per 16 columns as E8M0 bytes per 32, if pairs are equal powers of two."""
    if scale.shape[-1] % 2:
        return None
    bits = scale.float().view(torch.int32)
    power = bits >> 23  # the exponent field of a float32 is the E8M0 byte
    pairs = power.reshape(*scale.shape[:-1], -1, 2)
    exact = bool(((bits & 0x7FFFFF) == 0).all()) and bool((power > 0).all())
    if not exact or not bool((pairs[..., 0] == pairs[..., 1]).all()):
        return None
    return pairs[..., 0].to(torch.uint8)
