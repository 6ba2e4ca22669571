"""Weights for FP8 products with a8 rows on sm_90 (`wgmma`). Repacked once, at load.

FP8 stays as stored, with a float32 scale per 128 x 128 tile. MXFP4 (experts) is unpacked to E4M3 in
registers, and is stored so that a thread finds what it multiplies in 16 adjacent bytes. A tile has
64 rows and 128 columns:

    words   int32  [..., N/64, K/128, 64, 16]   eight weights to a word
    shifts  int32  [..., N/64, K/128, 64]       a byte per 32 columns

Word 4q + s of a row has columns 4q to 4q + 3 (low) and 16 + 4q to 16 + 4q + 3 (high) of the s-th 32
columns. Nibble i of a half word has the magnitude of column i, an index into a table of eight E4M3
codes; the fourth bits of odd nibbles are the signs of the low columns, those of even nibbles of the
high ones, so that one shift brings either to the top of each byte.

The scales of a matrix are folded into E4M3: a group of 32 columns is `shift` powers of two below
the largest scale, and E2M1 * 2^(6 - shift) is a normal E4M3 number for shifts up to 11. So one
power of two, `factor`, is left for the whole matrix, and nothing is rounded. Published experts
spread over 6 powers. Wider matrices are refused: they keep 16-bit activations.

Missing rows and columns of the last tiles are zero. In a *paired* matrix (gate rows above up rows)
8 gate rows alternate with their 8 up rows: one thread of the tensor core gets both.
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.formats import e2m1, e8m0, fp8, mxfp4
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, RepackedTensor
from dsv4.formats.spec import E8M0_BIAS, FP8_BLOCK, MXFP4_GROUP

TILE_ROWS, STEP = 64, 128
ROW_MULTIPLE = 128  # rows that one program multiplies in a prompt
MOST_SHIFT = 11
TOP_POWER = 6  # the largest weight, 6 * 2^6, is below 448
PAIR = 8
# wgmma cuts FP8 products to 13 bits below the largest of 32 before it adds them. The error relative
# to the sum of magnitudes, twice what a model of that gives for 288 columns (less for more)
SUM_ERROR = 2.0**-12
RANDOM_SIZE = 0.2  # of the weights of cases


@dataclass(frozen=True)
class A8Fp8(RepackedTensor):
    """`data` E4M3 [N, K], `scale` float32 [ceil(N/128), ceil(K/128)]."""

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.data.shape
        grid = (ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK))
        if self.data.dtype != torch.float8_e4m3fn or self.scale.shape != grid:
            raise KernelError(
                f"A8Fp8 of {self.data.dtype} {tuple(self.data.shape)} with scales "
                f"{tuple(self.scale.shape)}, expected float8_e4m3fn and {grid}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return Fp8BlockTensor(self.data, self.scale, FP8_BLOCK).dequantize(dtype)


@dataclass(frozen=True)
class A8Mxfp4(RepackedTensor):
    """`words` and `shifts` as described above; `factor` float32 [...]."""

    words: Tensor
    shifts: Tensor
    factor: Tensor
    rows: int
    columns: int
    paired: bool

    def __post_init__(self) -> None:
        lead = self.words.shape[:-4]
        tiles = padded_rows(self.rows, self.paired) // TILE_ROWS
        grid = (*lead, tiles, ceil(self.columns / STEP), TILE_ROWS)
        if (
            self.words.shape != (*grid, 16)
            or self.shifts.shape != grid
            or self.factor.shape != lead
            or {self.words.dtype, self.shifts.dtype} != {torch.int32}
        ):
            raise KernelError(
                f"A8Mxfp4 of {self.words.dtype} {tuple(self.words.shape)}, {self.shifts.dtype} "
                f"{tuple(self.shifts.shape)}, factor {tuple(self.factor.shape)}, which do not fit "
                f"{self.rows} x {self.columns}"
            )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.words.shape[:-4], self.rows, self.columns))

    def __getitem__(self, index: int | slice) -> "A8Mxfp4":
        if self.words.dim() < 5:
            raise KernelError("indexing needs a leading axis (stacked experts); this is a matrix")
        return self.map(lambda value: value[index])

    @property
    def num_steps(self) -> int:
        return self.words.shape[-3]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = _codes_of_words(self.words)  # [..., tiles, steps, 64, 128]
        shift = self.shifts.unsqueeze(-1) >> 8 * torch.arange(4, device=self.device) & 255
        power = (TOP_POWER - shift).float().repeat_interleave(MXFP4_GROUP, dim=-1)
        values = e2m1.decode(codes) * torch.exp2(power)
        values = values.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        if self.paired:
            half = self.rows // 2
            *lead, all_rows, all_columns = values.shape
            split = values.reshape(*lead, all_rows // (2 * PAIR), 2, PAIR, all_columns)
            split = split.movedim(-3, -4).flatten(-3, -2)
            values = split[..., :half, :].flatten(-3, -2)
        values = values[..., : self.rows, : self.columns]
        return (values * self.factor[..., None, None]).to(dtype)


def padded_rows(rows: int, paired: bool) -> int:
    if paired:
        return 2 * ceil(rows / 2 / TILE_ROWS) * TILE_ROWS
    return ceil(rows / ROW_MULTIPLE) * ROW_MULTIPLE


def a8_weight(
    weight: Nvfp4Tensor | Mxfp4Tensor | Fp8BlockTensor, *, paired: bool
) -> A8Fp8 | A8Mxfp4 | str:
    """`weight` for FP8 products, or why they would not be exact."""
    if weight.activations != "a8":
        return f"sm_90 has no products with {weight.activations} activations"
    if isinstance(weight, Nvfp4Tensor):
        return "NVFP4 weights have a scale per 16 columns, which E4M3 cannot take exactly"
    if isinstance(weight, Fp8BlockTensor):
        rows, columns = weight.tile
        if weight.data.dim() != 2 or rows % FP8_BLOCK or columns % FP8_BLOCK:
            return f"FP8 tiles of {rows} x {columns}, expected multiples of {FP8_BLOCK}"
        scale = weight.refine(FP8_BLOCK, FP8_BLOCK).scale
        scale = e8m0.decode(scale) if scale.dtype == torch.uint8 else scale
        order = {"whole_rows": weight.whole_rows, "k_ranges": weight.k_ranges}
        return A8Fp8(weight.data.contiguous(), scale.contiguous(), activations="a8", **order)
    if weight.packed.dim() == 2:
        return _a8_matrix(weight, paired=paired)
    found = [_a8_matrix(weight[index], paired=paired) for index in range(weight.shape[0])]
    tiles = [matrix for matrix in found if isinstance(matrix, A8Mxfp4)]
    if len(tiles) < len(found):
        return next(reason for reason in found if isinstance(reason, str))
    words, shifts, factor = (
        torch.stack([getattr(tile, name) for tile in tiles])
        for name in ("words", "shifts", "factor")
    )
    return replace(tiles[0], words=words, shifts=shifts, factor=factor)


def _a8_matrix(weight: Mxfp4Tensor, *, paired: bool) -> A8Mxfp4 | str:
    rows, columns = weight.shape
    if paired and rows % 2:
        return f"gate and up rows together are {rows}, expected an even number"
    codes = e2m1.unpack(weight.packed)
    present = (codes & 7).reshape(rows, -1, MXFP4_GROUP).amax(-1) > 0
    scale = weight.scale.to(torch.int32)
    top = int(torch.where(present, scale, 0).max())
    shift = torch.where(present, top - scale, 0)
    if int(shift.max()) > MOST_SHIFT or top > 2 * E8M0_BIAS:
        return (
            f"MXFP4 scales of one matrix spread over {int(shift.max()) + 1} powers of two, E4M3 "
            f"takes {MOST_SHIFT + 1}"
        )
    if paired:
        codes, shift = _pair(codes), _pair(shift)
    short = (0, -columns % STEP, 0, -codes.shape[0] % ROW_MULTIPLE)
    codes = torch.nn.functional.pad(codes, short)
    shift = torch.nn.functional.pad(shift, (0, short[1] // MXFP4_GROUP, 0, short[3]))
    factor = torch.tensor(2.0 ** (top - E8M0_BIAS - TOP_POWER), device=codes.device)
    parts = _words_of_codes(_tile(codes)), _narrow(_join_bytes(_tile(shift)))
    return A8Mxfp4(*parts, factor, rows, columns, paired, activations="a8")


def random_a8(
    rows: int, columns: int, generator: torch.Generator, *, count: int = 0, paired: bool = False
) -> A8Mxfp4:
    """A random matrix, or `count` of them stacked, for cases."""
    lead = (count,) if count else ()
    power = torch.randint(-4, 3, (*lead, rows, columns // MXFP4_GROUP), generator=generator)
    size = torch.exp2(power.float()).repeat_interleave(MXFP4_GROUP, dim=-1)
    values = torch.randn(*lead, rows, columns, generator=generator) * size * 0.1
    found = a8_weight(Mxfp4Tensor(*mxfp4.quantize(values), activations="a8"), paired=paired)
    if isinstance(found, str):
        raise KernelError(found)
    assert isinstance(found, A8Mxfp4)
    return found


def random_a8_fp8(rows: int, columns: int, generator: torch.Generator) -> A8Fp8:
    values = torch.randn(rows, columns, generator=generator) * RANDOM_SIZE
    weight = Fp8BlockTensor(*fp8.quantize_tiles(values), FP8_BLOCK, activations="a8")
    found = a8_weight(weight, paired=False)
    assert isinstance(found, A8Fp8)
    return found


def _pair(value: Tensor) -> Tensor:
    """Gate rows above up rows -> 8 gate rows, their 8 up rows, and so on."""
    half = value.shape[0] // 2
    halves = torch.nn.functional.pad(value.reshape(2, half, -1), (0, 0, 0, -half % TILE_ROWS))
    return halves.reshape(2, -1, PAIR, value.shape[1]).transpose(0, 1).reshape(-1, value.shape[1])


def _tile(value: Tensor) -> Tensor:
    """`[N, 128 s] or [N, 4 s] -> [N/64, s, 64, 128 or 4]`."""
    width = STEP if value.dtype == torch.uint8 else STEP // MXFP4_GROUP
    return value.reshape(value.shape[0] // TILE_ROWS, TILE_ROWS, -1, width).transpose(1, 2)


def _words_of_codes(codes: Tensor) -> Tensor:
    """E2M1 codes `[..., 128]` -> int32 `[..., 16]`."""
    parts = codes.long().reshape(*codes.shape[:-1], 4, 2, 4, 4)
    parts = parts.movedim(-2, -4)  # q, s, half, column
    place = torch.arange(4, device=codes.device)
    size, sign = parts & 7, parts >> 3
    low = (size[..., 0, :] << 4 * place) + (sign[..., 0, :] << 8 * place + 7)
    high = (size[..., 1, :] << 4 * place + 16) + (sign[..., 1, :] << 8 * place + 3)
    return _narrow((low + high).sum(-1).flatten(-2))


def _codes_of_words(words: Tensor) -> Tensor:
    word = words.long().reshape(*words.shape[:-1], 4, 4, 1)
    place = torch.arange(4, device=words.device)
    low = (word >> 4 * place & 7) + ((word >> 8 * place + 7 & 1) << 3)
    high = (word >> 4 * place + 16 & 7) + ((word >> 8 * place + 3 & 1) << 3)
    parts = torch.stack((low, high), dim=-2)  # q, s, half, column
    return parts.movedim(-4, -2).flatten(-4).to(torch.uint8)


def _join_bytes(value: Tensor) -> Tensor:
    return (value.long() << 8 * torch.arange(4, device=value.device)).sum(-1)


def _narrow(value: Tensor) -> Tensor:
    """The low 32 bits."""
    return ((value + 2**31) % 2**32 - 2**31).to(torch.int32).contiguous()
