"""Activation rows in low precision, as tensor cores multiply them.

    a4   NVFP4: E2M1 numbers, an E4M3 scale per 16 columns, one float32 scale per row
    a8   FP8: E4M3 numbers, a power-of-two scale per 128 columns
    a16  unrounded

a8 is what the official checkpoints were trained with: scale 2^ceil(log2(max(amax, 1e-4) / 448)) of
128 columns, code E4M3(x / scale), ties to even. The last group of a row may be short. A group with
Inf or NaN has NaN codes.

The float32 scale of a4 is per row:

    inverse = 2688 / amax;  row_scale = amax / 2688        (2688 = 6 * 448)
    scale   = E4M3(max(block) * inverse / 6), at least 2^-9
    code    = E2M1(x * (inverse / scale))                  ties to even, saturating at 6

No scale depends on another row. Every step rounds to float32 once, in this order, so kernels
produce the same bytes. An amax
below 2^-100 is raised to 2^-100: a zero row has zero codes and a scale that is safe to divide by. A
row with Inf or NaN has zero codes and a row scale of NaN: its results are NaN, never plausible.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.errors import OptionError
from dsv4.formats import e2m1, fp8
from dsv4.formats.groups import expand, grouped_amax
from dsv4.formats.spec import E2M1_MAX, E4M3_MAX, NVFP4_GROUP, Activations

TOP = E2M1_MAX * E4M3_MAX
SIXTH = 1.0 / E2M1_MAX
SMALLEST_AMAX = 2.0**-100
SMALLEST_SCALE = 2.0**-9  # smallest positive E4M3
A8_GROUP = 128  # columns under one scale


class Fp4Rows(NamedTuple):
    codes: Tensor  # uint8 [rows, K/2], low nibble first
    scales: Tensor  # float8_e4m3fn [rows, K/16]
    row_scale: Tensor  # float32 [rows]


def quantize_rows(x: Tensor) -> Fp4Rows:
    """`[rows, K]`, K a multiple of 16 -> codes, block scales and row scales."""
    wide = x.float()
    amax = wide.abs().amax(1)
    finite = torch.isfinite(amax)
    amax = amax.clamp(min=SMALLEST_AMAX)
    top = torch.full_like(amax, TOP)  # with a Python number torch would use a reciprocal
    inverse = torch.where(finite, top / amax, 0.0)
    blocks = wide.view(x.shape[0], -1, NVFP4_GROUP)
    # float(1/6) as float32: the kernel multiplies by the same number
    largest = blocks.abs().amax(2) * inverse[:, None] * SIXTH
    largest = torch.where(finite[:, None], largest, 0.0)
    scales = largest.clamp(SMALLEST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks * (inverse[:, None] / scales.float())[:, :, None]
    codes = e2m1.encode(torch.where(finite[:, None, None], scaled, 0.0))
    return Fp4Rows(
        e2m1.pack(codes.view(x.shape)), scales, torch.where(finite, amax / top, float("nan"))
    )


def dequantize_rows(rows: Fp4Rows) -> Tensor:
    """float32 `[rows, K]`; one rounding, in the product with the row's scale."""
    values = e2m1.decode_packed(rows.codes)
    values *= expand(rows.scales.float(), NVFP4_GROUP, values.shape[1])
    return values * rows.row_scale[:, None]


def quantize_a8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., K]` -> E4M3 codes `[..., K]` and E8M0 scales (uint8) `[..., ceil(K / 128)]`."""
    codes, scales = fp8.quantize_groups(x, A8_GROUP, check=False)
    finite = torch.isfinite(grouped_amax(x.float(), A8_GROUP))
    wide = torch.where(expand(finite, A8_GROUP, x.shape[-1]), codes.float(), float("nan"))
    return wide.to(codes.dtype), scales


def shares_scales(width: Activations, columns: int) -> bool:
    """Whether one of `columns` columns, part of a row, shares its scale with another part."""
    return width == "a4" or (width == "a8" and columns % A8_GROUP != 0)


def rounded(x: Tensor, width: Activations) -> Tensor:
    """`[..., K]` as a product reads it: unchanged for a16, otherwise float32."""
    if width == "a16":
        return x
    if width == "a8":
        return fp8.dequantize_groups(*quantize_a8(x), group=A8_GROUP)
    if width == "a4":
        rows = x.reshape(-1, x.shape[-1])
        return dequantize_rows(quantize_rows(rows)).view(x.shape)
    raise OptionError(f"activations {width!r}, expected a16, a8 or a4")
