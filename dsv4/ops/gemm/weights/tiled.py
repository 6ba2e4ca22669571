"""FP4 weights in the kernels' memory order. Repacked once, at load; no value changes.

A matrix `[N, K]` is split into tiles of 64 rows by 128 columns, each contiguous in memory:

    packed  int16  [..., N/64, K/128, 2, 64, 16]   four weights to a word
    scale   int16  [..., N/64, K/128, 64, 4]       the codes of two groups of 16 columns

A row of a tile has 32 words, 16 in each half of its columns. Word i of a half holds columns `i`,
`16 + i`, `32 + i` and `48 + i` of it (slots 0..3): a slot of 16 words is one group of 16 columns,
under one scale. A weight is sign and magnitude `eem`; in slots 0 to 2 the magnitude is at bits
6..8, 3..5, 0..2 and the sign at 15, 12, 9, so one shift and one mask give a bf16 equal to the
weight times 2^-126. Slot 3 uses the remaining bits: 13, 14, 10 (low to high), sign 11.

The scale code is bits 4..11 of bf16(scale * 2^119); the bits above are 7 for every scale. Element s
in a row of `scale` holds the codes of slot s, the first half's in the low byte. E4M3 subnormals
come out normalised; a zero scale has no code, so the weights of its group are set to zero.

MXFP4 (experts only) differs in its scales: one byte per 32 columns, so two slots share it.

    scale   int16  [..., N/64, K/128, 64, 2]       the codes of four groups of 32 columns

The code is the exponent of bf16(scale * 2^119): E8M0 plus 119. If that would not fit into a byte,
all codes of a matrix are lowered, and the global scale, a power of two, makes up for it.

Missing rows and columns of the last tiles are zero. Each tile of a *paired* matrix (gate rows above
up rows) has 32 gate rows and their 32 up rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.formats import e2m1, mxfp4, nvfp4
from dsv4.formats.quantized import Mxfp4Tensor, Nvfp4Tensor, PackedWeight, QuantizedTensor
from dsv4.formats.spec import MXFP4_GROUP, NVFP4_GROUP

TILE_ROWS = 64  # as kernels assume
TILE_COLUMNS = 128
ROW_MULTIPLE = 128  # the widest kernels take two row tiles at a time
_SCALE_TOP = 7 << 12  # the bits of bf16(scale * 2^119) above the code
_SCALE_POWER = 119
_MOST_EXPONENT = 254  # of a finite bf16


class _Tiled(PackedWeight, ABC):
    """Base of both formats; `packed` and `scale` are tiled as described above."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor
    rows: int
    columns: int
    paired: bool

    def _check(self, codes: int) -> None:
        p, s, g = self.packed, self.scale, self.global_scale
        padded = ceil(self.rows / ROW_MULTIPLE) * ROW_MULTIPLE
        if self.paired:
            padded = 2 * ceil(self.rows / 2 / TILE_ROWS) * TILE_ROWS
        grid = (padded // TILE_ROWS, ceil(self.columns / TILE_COLUMNS))
        if (
            p.dtype != torch.int16
            or s.dtype != torch.int16
            or p.shape[-5:] != (*grid, 2, TILE_ROWS, TILE_COLUMNS // 8)
            or s.shape != (*p.shape[:-5], *grid, TILE_ROWS, codes // 2)
            or g.shape[:-1] != p.shape[:-5]
            or self.rows % g.shape[-1]
        ):
            raise KernelError(
                f"{type(self).__name__} of {p.dtype} {tuple(p.shape)}, {s.dtype} "
                f"{tuple(s.shape)}, global {tuple(g.shape)}, "
                f"which do not fit {self.rows} x {self.columns}"
            )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-5], self.rows, self.columns))

    @property
    def num_steps(self) -> int:
        """Tiles along K."""
        return self.packed.shape[-4]

    def __getitem__(self, index: int | slice) -> Self:
        if self.packed.dim() < 6:
            raise KernelError("indexing needs a leading axis (stacked experts); this is a matrix")
        return self.map(lambda value: value[index])

    @abstractmethod
    def plain(self) -> QuantizedTensor:
        """The weight as a checkpoint stores it."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.plain().dequantize(dtype)

    def row_range(self, start: int, stop: int) -> NoReturn:
        raise KernelError(f"rows {start}:{stop} of a tiled weight: cut weights before tiling them")

    def column_range(self, start: int, stop: int) -> NoReturn:
        raise KernelError(f"columns {start}:{stop} of a tiled weight: cut before tiling")

    def _plain_parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The untiled weight's E2M1 bytes and codes `[..., rows, columns of codes]`; the argument
        `codes` is in tile order, one byte each."""
        lead = self.packed.shape[:-5]
        rows = self.packed.shape[-5] * TILE_ROWS
        words = self.packed.movedim(-2, -4).reshape(*lead, rows, -1)
        codes = codes.transpose(-3, -2).reshape(*lead, rows, -1)
        if self.paired:
            words, codes = _unpair(words), _unpair(codes)
        half = self.rows // 2
        parts = []
        for value in (words, codes):
            if self.paired:
                gate, up = value.chunk(2, dim=-2)
                value = torch.cat((gate[..., :half, :], up[..., :half, :]), dim=-2)
            parts.append(value[..., : self.rows, :])
        packed = e2m1.pack(_codes_of_words(parts[0])[..., : self.columns])
        return packed.contiguous(), parts[1]


@dataclass(frozen=True)
class TiledNvfp4(_Tiled, Nvfp4Tensor):
    rows: int
    columns: int
    paired: bool = False

    def __post_init__(self) -> None:
        self._check(TILE_COLUMNS // NVFP4_GROUP)

    def plain(self) -> Nvfp4Tensor:
        both = self.scale.to(torch.int32) & 0xFFFF
        packed, codes = self._plain_parts(torch.cat((both & 0xFF, both >> 8), dim=-1))
        scale = _scale_of_codes(codes)[..., : self.columns // NVFP4_GROUP]
        return Nvfp4Tensor(
            packed, scale.contiguous(), self.global_scale, activations=self.activations
        )


@dataclass(frozen=True)
class TiledMxfp4(_Tiled, Mxfp4Tensor):
    global_scale: Tensor  # [..., 1] fp32, a power of two
    rows: int
    columns: int
    paired: bool = False

    def __post_init__(self) -> None:
        self._check(TILE_COLUMNS // MXFP4_GROUP)

    def plain(self) -> Mxfp4Tensor:
        packed, codes = self._plain_parts(self.scale.contiguous().view(torch.uint8))
        lowered = self.global_scale.log2().to(torch.int32).unsqueeze(-1)
        scale = codes[..., : self.columns // MXFP4_GROUP].to(torch.int32) + lowered - _SCALE_POWER
        return Mxfp4Tensor(packed, scale.to(torch.uint8), activations=self.activations)


TiledFp4 = TiledNvfp4 | TiledMxfp4
Fp4 = TypeVar("Fp4", TiledNvfp4, TiledMxfp4, Nvfp4Tensor)


def stacked(matrices: Iterable[Fp4]) -> Fp4:
    """One weight of matrices in one format."""
    parts = list(matrices)
    if not parts:
        raise KernelError("a stack of no matrices cannot be tiled")
    whole: dict[str, Any] = {}
    for name in ("packed", "scale", "global_scale"):
        values = [getattr(part, name) for part in parts]
        whole[name] = torch.stack([v.view(torch.uint8) for v in values]).view(values[0].dtype)
    return replace(parts[0], **whole)


def tile_nvfp4(weight: Nvfp4Tensor, *, paired: bool = False) -> TiledNvfp4:
    """Tile `weight` (a matrix or a stack), one matrix of a stack at a time to save memory."""
    rows, columns = weight.shape[-2:]
    if weight.packed.dim() > 2:
        return stacked(tile_nvfp4(weight[i], paired=paired) for i in range(len(weight.packed)))
    codes = e2m1.unpack(weight.packed)
    magnitude = weight.scale.float()
    codes = codes * (magnitude > 0).repeat_interleave(NVFP4_GROUP, dim=-1)
    words, scale = _words_of_codes(codes), _codes_of_scale(magnitude)
    if paired:
        words, scale = _pair(words), _pair(scale)
    words = _halve(_tile(words, TILE_COLUMNS // 4))
    scale = _join_codes(_tile(scale, TILE_COLUMNS // NVFP4_GROUP))
    parts = words, scale, weight.global_scale.contiguous()
    return TiledNvfp4(*parts, rows, columns, paired, activations=weight.activations)


def tile_mxfp4(weight: Mxfp4Tensor, *, paired: bool = False) -> TiledMxfp4:
    """Like `tile_nvfp4`."""
    rows, columns = weight.shape[-2:]
    if weight.packed.dim() > 2:
        return stacked(tile_mxfp4(weight[i], paired=paired) for i in range(len(weight.packed)))
    words = _words_of_codes(e2m1.unpack(weight.packed))
    least, most = int(weight.scale.min()), int(weight.scale.max())
    lowered = max(most + _SCALE_POWER - _MOST_EXPONENT, 0)
    if most > _MOST_EXPONENT or least + _SCALE_POWER <= lowered:
        raise KernelError(
            f"MXFP4 exponents of one matrix are {least} to {most}, expected none above "
            f"{_MOST_EXPONENT}, and less far apart; look at the file with `dsv4 check --values`"
        )
    codes = (weight.scale.to(torch.int32) + _SCALE_POWER - lowered).to(torch.uint8)
    if paired:
        words, codes = _pair(words), _pair(codes)
    words = _halve(_tile(words, TILE_COLUMNS // 4))
    scale = _tile(codes, TILE_COLUMNS // MXFP4_GROUP).view(torch.int16)
    parts = words, scale, torch.tensor([2.0**lowered], device=words.device)
    return TiledMxfp4(*parts, rows, columns, paired, activations=weight.activations)


def random_tiled(
    rows: int,
    columns: int,
    generator: torch.Generator,
    *,
    count: int | None = None,
    paired: bool = False,
) -> TiledNvfp4:
    """A random matrix, or `count` of them stacked, for cases; paired: two global scales."""
    num_parts = 2 if paired else 1
    parts = []
    for index in range((count or 1) * num_parts):
        values = torch.randn(rows // num_parts, columns, generator=generator)
        parts.append(values * (0.2 + 0.1 * (index % num_parts)))
    lead = (rows,) if count is None else (count, rows)
    return tile_nvfp4(quantized_parts(parts, lead, num_parts), paired=paired)


def quantized_parts(parts: Iterable[Tensor], lead: tuple[int, ...], num_parts: int) -> Nvfp4Tensor:
    """A matrix, or several, `[*lead, columns]`, whose parts have a global scale each."""
    whole = stacked(Nvfp4Tensor(p, s, g.reshape(1)) for p, s, g in map(nvfp4.quantize, parts))
    packed, scale = (value.reshape(*lead, -1) for value in (whole.packed, whole.scale))
    return Nvfp4Tensor(packed, scale, whole.global_scale.reshape(*lead[:-1], num_parts))


def random_mxfp4(
    rows: int, columns: int, generator: torch.Generator, *, count: int | None = None
) -> Mxfp4Tensor:
    """A random matrix, or `count` of them stacked, with groups of different magnitude."""
    lead = () if count is None else (count,)
    power = torch.randint(-4, 5, (*lead, rows, columns // MXFP4_GROUP), generator=generator)
    size = torch.exp2(power.float()).repeat_interleave(MXFP4_GROUP, dim=-1)
    values = torch.randn(*lead, rows, columns, generator=generator) * size * 0.1
    return Mxfp4Tensor(*mxfp4.quantize(values))


def _tile(value: Tensor, width: int) -> Tensor:
    """`[N, W] -> [N/64, W/width, 64, width]`, zeros where rows or columns are missing."""
    rows, columns = value.shape
    value = torch.nn.functional.pad(value, (0, -columns % width, 0, -rows % ROW_MULTIPLE))
    grid = value.reshape(value.shape[0] // TILE_ROWS, TILE_ROWS, -1, width)
    return grid.transpose(1, 2).contiguous()


def _halve(tiles: Tensor) -> Tensor:
    """`[..., 64, 32] -> [..., 2, 64, 16]`: the halves of a tile in sequence."""
    halves = tiles.reshape(*tiles.shape[:-1], 2, tiles.shape[-1] // 2)
    return halves.transpose(-3, -2).contiguous()


def _join_codes(tiles: Tensor) -> Tensor:
    """Codes `[..., 8]` -> `[..., 4]` int16: slot s of the first half in the low byte."""
    low, high = tiles.to(torch.int32).chunk(2, dim=-1)
    both = low | high << 8
    return ((both ^ 0x8000) - 0x8000).to(torch.int16)


def _pair(value: Tensor) -> Tensor:
    """Gate rows above up rows -> 32 gate rows, their 32 up rows, and so on."""
    half, odd = divmod(value.shape[0], 2)
    if odd:
        raise KernelError(f"gate and up rows together are {2 * half + 1}, expected an even number")
    halves = value.reshape(2, half, -1)
    halves = torch.nn.functional.pad(halves, (0, 0, 0, -half % TILE_ROWS))
    grid = halves.reshape(2, -1, TILE_ROWS // 2, value.shape[1])
    return grid.transpose(0, 1).reshape(-1, value.shape[1])


def _unpair(value: Tensor) -> Tensor:
    *lead, rows, width = value.shape
    grid = value.reshape(*lead, rows // TILE_ROWS, 2, TILE_ROWS // 2, width)
    return grid.transpose(-4, -3).reshape(*lead, rows, width)


def _words_of_codes(codes: Tensor) -> Tensor:
    """`[N, K]` E2M1 codes -> `[N, K/4]` int16, K zero-padded to a multiple of 128."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % TILE_COLUMNS))
    slots = codes.to(torch.int32).reshape(codes.shape[0], -1, 4, 16)  # half, slot, word
    sign, mag = slots >> 3, slots & 7
    word = sign[:, :, 0] << 15 | mag[:, :, 0] << 6
    word |= sign[:, :, 1] << 12 | mag[:, :, 1] << 3
    word |= sign[:, :, 2] << 9 | mag[:, :, 2]
    low, mid, high = mag[:, :, 3] & 1, mag[:, :, 3] >> 1 & 1, mag[:, :, 3] >> 2
    word |= sign[:, :, 3] << 11 | low << 13 | mid << 14 | high << 10
    return ((word ^ 0x8000) - 0x8000).to(torch.int16).reshape(codes.shape[0], -1)


def _codes_of_words(words: Tensor) -> Tensor:
    word = words.to(torch.int32) & 0xFFFF
    slots = [
        (word >> 15) << 3 | word >> 6 & 7,
        (word >> 12 & 1) << 3 | word >> 3 & 7,
        (word >> 9 & 1) << 3 | word & 7,
        (word >> 11 & 1) << 3 | (word >> 10 & 1) << 2 | word >> 13 & 3,
    ]
    grouped = [slot.reshape(*words.shape[:-1], -1, 16) for slot in slots]
    return torch.stack(grouped, dim=-2).flatten(-3).to(torch.uint8)


def _codes_of_scale(scale: Tensor) -> Tensor:
    bits = (scale * 2.0**_SCALE_POWER).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    return (bits >> 4 & 0xFF).to(torch.uint8)


def _scale_of_codes(codes: Tensor) -> Tensor:
    bits = codes.to(torch.int32) << 4 | _SCALE_TOP
    value = bits.to(torch.int16).view(torch.bfloat16).float() * 2.0**-_SCALE_POWER
    return value.to(torch.float8_e4m3fn)
