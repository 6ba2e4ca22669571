# mypy: ignore-errors
"""a8 rows for FP8 products on sm_90: E4M3 codes, and scales transposed, one row per 128 columns.

A program holds a row in registers; in prompts 16 rows of 512 columns, so that scales are stored 16
at a time. Columns are padded with zeros to a multiple of 128. With a `limit`, what is quantised is
SwiGLU of gate and up, concatenated in `x`, rounded to bf16.

Experts of prompts read rows of sorted pairs (moe/group_by_expert_triton.py), so that those of an
expert are contiguous: a token's row is stored once for itself and once for each of its pairs. The
scales of such rows are stored by tiles, a line per tile and 128 columns, since copies to shared
memory (TMA) begin at multiples of four scales and an expert's rows anywhere.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend, swiglu, to_e4m3
from dsv4.ops.core.launch import ROW_WARPS, dependent_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.quantize_rows import A8_GROUP
from dsv4.ops.gemm.quantize_rows_triton import a8_scale

TALL, TALL_ROWS, TALL_GROUPS = 256, 16, 4  # from how many rows on, and what a program then has
EARLY_ROWS = 64  # up to here launches start before the previous one is complete


@dataclass(frozen=True)
class A8Rows:
    codes: torch.Tensor  # float8_e4m3fn [rows, columns]
    # float32 [columns / 128, rows or more]; of pairs [tiles, columns / 128, rows of a tile]
    scales: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def num_steps(self) -> int:
        return self.codes.shape[1] // A8_GROUP


class A8Buffers(NamedTuple):
    """`A8Rows` as kernels take them."""

    codes: torch.Tensor
    scales: torch.Tensor
    stride: int  # between lines of scales


class PairBuffers(NamedTuple):
    """Rows of sorted pairs, and where they are, as kernels take them."""

    codes: torch.Tensor
    scales: torch.Tensor
    places: torch.Tensor  # of a pair among the sorted ones
    slots: torch.Tensor  # of a sorted pair among the rows of all tiles


@triton.jit
def _store_codes(codes, code, row, group, live, columns):
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(codes + (row.to(tl.int64) * columns)[:, None] + column, code, mask=live[:, None])


@triton.jit
def _store_pair(to, code, scale, place, group, live, columns, BM: tl.constexpr):
    slot = tl.load(to.slots + place, mask=live, other=-1)
    live = slot >= 0
    _store_codes(to.codes, code, place, group, live, columns)
    line = (slot // BM).to(tl.int64) * (columns // 128) + group
    tl.store(to.scales + line * BM + slot % BM, scale, mask=live)


@triton.jit(do_not_specialize=["num_rows"])
def _a8_rows_kernel(
    x, x_stride, size, to, pairs, columns, num_rows, limit,
    SWIGLU: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """With tiles of BM rows, for each row's CHOSEN pairs too; 0: a row is a sorted pair's."""
    depend(DEPENDENT)
    place = tl.arange(0, ROWS * GROUPS)
    across = tl.cdiv(columns, 128 * GROUPS)  # a row's groups by adjacent programs
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + place % ROWS
    group = tl.program_id(0) % across * GROUPS + place // ROWS
    live = (row < num_rows) & (group < columns // 128)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = x + (row * x_stride)[:, None] + column
    mask = live[:, None] & (column < size)
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
        value = swiglu(value, up, limit).to(tl.bfloat16).to(tl.float32)
    power, inverse = a8_scale(value)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    code = to_e4m3(value * inverse[:, None])
    if BM == 0 or CHOSEN > 0:
        _store_codes(to.codes, code, row, group, live, columns)
        tl.store(to.scales + group * to.stride + row, scale, mask=live)
    if BM > 0 and CHOSEN == 0:
        _store_pair(pairs, code, scale, row, group, live, columns, BM)
    for i in tl.static_range(CHOSEN):
        pair = tl.load(pairs.places + row * CHOSEN + i, mask=live, other=-1)
        _store_pair(pairs, code, scale, pair, group, pair >= 0, columns, BM)


def room(device, name: str, count: int, columns: int, tiles: tuple[int, int] | None = None):
    """`A8Rows` in the workspace `name`. `tiles`: how many, and their rows."""
    steps, stride = columns // A8_GROUP, triton.cdiv(count, 4) * 4  # multiples of 16 bytes
    shape = (steps, stride) if tiles is None else (tiles[0], steps, tiles[1])
    codes = workspace(device, f"{name}_codes", count * columns, torch.uint8)
    codes = codes[: count * columns].view(torch.float8_e4m3fn).view(count, columns)
    scales = workspace(device, f"{name}_scales", prod(shape), torch.float32)
    return A8Rows(codes, scales[: prod(shape)].view(shape))


def make_a8_rows(x, name: str, *, limit=None) -> A8Rows:
    """`x` `[rows, size]` quantised into the workspace `name`. `limit`: see above."""
    size = x.shape[1] if limit is None else x.shape[1] // 2
    rows = room(x.device, name, x.shape[0], _columns(size))
    _launch(x, size, rows, None, tall=x.shape[0] >= TALL, limit=limit)
    return rows


def make_pair_rows(z, name: str, tiles, bm: int) -> A8Rows:
    """`z`, a row per sorted pair, for `tiles` of `bm` rows."""
    pairs = room(z.device, name, z.shape[0], _columns(z.shape[1]), (tiles.num_tiles, bm))
    _launch(z, z.shape[1], None, (pairs, tiles.groups))
    return pairs


def make_token_rows(x, name: str, pairs_name: str, tiles, bm: int, chosen: int):
    """(rows of tokens, rows of their pairs, `chosen` each, for `tiles` of `bm` rows)."""
    count, columns = x.shape[0], _columns(x.shape[1])
    rows = room(x.device, name, count, columns)
    pairs = room(x.device, pairs_name, count * chosen, columns, (tiles.num_tiles, bm))
    _launch(x, x.shape[1], rows, (pairs, tiles.groups), chosen=chosen)
    return rows, pairs


def _columns(size: int) -> int:
    return triton.cdiv(size, A8_GROUP) * A8_GROUP


def _launch(x, size, rows, pairs, *, chosen=0, tall=True, limit=None) -> None:
    count, columns, bm = x.shape[0], _columns(size), 0
    if rows is not None:
        rows = A8Buffers(rows.codes, rows.scales, rows.scales.stride(0))
    if pairs is not None:
        made, groups = pairs
        pairs = PairBuffers(made.codes, made.scales, groups.places, groups.slots)
        bm = made.scales.shape[2]
    across = TALL_GROUPS if tall else triton.next_power_of_2(columns // A8_GROUP)
    num = TALL_ROWS if tall else 1
    _a8_rows_kernel[(triton.cdiv(count, num) * triton.cdiv(columns // A8_GROUP, across),)](
        x, x.stride(0), size, rows, pairs, columns, count, limit or 0.0,
        SWIGLU=limit is not None, CHOSEN=chosen, BM=bm, ROWS=num, GROUPS=across,
        **dependent_options(x.device, ROW_WARPS if across <= 64 else 8, early=count <= EARLY_ROWS),
    )  # fmt: skip
