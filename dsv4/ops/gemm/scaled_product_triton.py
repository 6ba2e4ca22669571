# mypy: ignore-errors
"""Low-precision products on sm_100: block-scaled tensor-core instructions, weights in the M slot.

A weight (weights/scaled.py) is multiplied with quantised rows (quantize_rows_triton.py): NVFP4 x
NVFP4, or MXFP4 or FP8 x MXFP8. A program computes 128 outputs for BN rows, in one of two variants:

    few rows    pointers: up to eight matrices per launch; split-K, one program per range
    many rows   descriptors, so TMA feeds the tensor core; ranges in sequence

Both use the same steps and ranges of K, which depend only on the weight's shape, so a row's order
of summation is the same. Row and weight scales are applied in fp32 at the end. The same kernels
serve routed experts (moe/experts_scaled_triton.py): `groups` assigns each tile of rows its expert,
and results go to the rows of the pairs or stay in sorted order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4.ops.core.gpu import Gpu
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import dot_device as dd
from dsv4.ops.gemm.quantize_rows_triton import row_buffers
from dsv4.ops.gemm.split_k import num_ranges, split_k
from dsv4.ops.gemm.weights.scaled import ROWS

FEW_ROWS = 64  # up to here, the pointer variant
RANGE_COLUMNS = 256  # ranges are multiples of this
WANTED_PROGRAMS = 296  # two per multiprocessor of a B200


@triton.jit
def _words_as_bytes(words, BN: tl.constexpr, COUNT: tl.constexpr):
    """int32 `[BN, COUNT / 4]` -> their bytes `[BN, COUNT]`, lowest first."""
    halves = tl.join(words, words >> 16)
    both = tl.join(halves, halves >> 8)
    return (both & 255).to(tl.uint8).reshape(BN, COUNT)


@triton.jit
def _untile(scale, TILES: tl.constexpr, CHUNKS: tl.constexpr):
    """Scales in tensor-core order -> `[128 * TILES, 4 * CHUNKS]`, without moving data."""
    grid = scale.reshape(TILES, CHUNKS, 32, 4, 4)
    return grid.trans(0, 3, 2, 1, 4).reshape(128 * TILES, 4 * CHUNKS)


@triton.jit
def _product(w, w_scale, x, x_scale, acc, A8: tl.constexpr, W8: tl.constexpr):
    """`acc + w . x`, `[128, K] x [K, BN]`, scales by row and group."""
    if A8 and W8:
        return tl.dot_scaled(w, w_scale, "e4m3", x, x_scale, "e4m3", acc)
    elif A8:
        return tl.dot_scaled(w, w_scale, "e2m1", x, x_scale, "e4m3", acc)
    else:
        return tl.dot_scaled(w, w_scale, "e2m1", x, x_scale, "e2m1", acc)


@triton.jit
def _few_sum(
    words, scales, codes, x_scales, rows, first, last, k_steps,
    BN: tl.constexpr, A8: tl.constexpr, W8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 `[128, BN]` over steps `first` to `last`; `words` and `scales` point at a row tile."""
    BK: tl.constexpr = 128 if A8 else 256
    GROUP: tl.constexpr = 32 if A8 else 16
    CHUNKS: tl.constexpr = BK // (4 * GROUP)
    WB: tl.constexpr = BK if W8 else BK // 2
    XB: tl.constexpr = BK if A8 else BK // 2
    SCALE: tl.constexpr = tl.uint8 if A8 else tl.float8e4nv
    rn = tl.arange(0, 128)
    w_ptrs = words + rn[:, None] * (k_steps * WB) + tl.arange(0, WB)[None, :] + first * WB
    s_ptrs = scales.to(tl.pointer_type(SCALE)) + first * (CHUNKS * 512)
    s_ptrs += tl.arange(0, CHUNKS * 512)[None, :]
    x_ptrs = codes + rows[None, :] * (k_steps * XB) + tl.arange(0, XB)[:, None] + first * XB
    xs = x_scales.to(tl.pointer_type(tl.int32))
    xs_ptrs = xs + rows[:, None] * (k_steps * CHUNKS) + tl.arange(0, CHUNKS)[None, :]
    xs_ptrs += first * CHUNKS
    acc = tl.zeros((128, BN), dtype=tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_ptrs)
        s = tl.load(s_ptrs)
        x = tl.load(x_ptrs)
        if W8:
            w = w.to(tl.float8e4nv, bitcast=True)
        if A8:
            x = x.to(tl.float8e4nv, bitcast=True)
        x_scale = _words_as_bytes(tl.load(xs_ptrs), BN, 4 * CHUNKS).to(SCALE, bitcast=True)
        acc = _product(w, _untile(s, 1, CHUNKS), x, x_scale, acc, A8, W8)
        w_ptrs += WB
        s_ptrs += CHUNKS * 512
        x_ptrs += XB
        xs_ptrs += CHUNKS
    return acc


@triton.jit
def _tile_of(index, groups, BN: tl.constexpr):
    """(expert, mask of the live rows, their sorted places, their pairs) of a routed tile."""
    expert = tl.load(groups.tile_expert + index)
    at = tl.load(groups.tile_start + index) + tl.arange(0, BN)
    live = (at < tl.load(groups.tile_end + index)) & (expert >= 0)
    return expert, live, at, tl.load(groups.sorted_pairs + at, mask=live, other=0)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x, num_rows, group_rows, k_steps, m, partials, counters, groups, chosen,
    NUM: tl.constexpr, F32: tl.constexpr, ROUTED: tl.constexpr, TO_PAIRS: tl.constexpr,
    BN: tl.constexpr, A8: tl.constexpr, W8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`F32`: see `is_wide`. Each group of weight rows reads its own of `x.fold` rows; a routed pair
    reads its token's row (`chosen` pairs per token), or if that is 0 its own in sorted order."""
    pid = tl.program_id(0)
    count = dd.select_matrix(m.ranges, m.firsts, pid, NUM)
    per_range = dd.select_matrix(m.range_steps, m.firsts, pid, NUM)
    index = pid - dd.select_matrix(m.firsts, m.firsts, pid, NUM)
    split = index % count
    tile = index // count
    size = dd.select_matrix(m.sizes, m.firsts, pid, NUM)
    part_rows = dd.select_matrix(m.parts, m.firsts, pid, NUM)
    row_tiles = tl.cdiv(size, 128)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    expert = 0
    live = place < num_rows
    out_rows = place
    if ROUTED:
        expert, live, sorted_rows, pairs = _tile_of(tl.program_id(1), groups, BN)
        if expert < 0:
            return
        out_rows = pairs if TO_PAIRS else sorted_rows
    rows = place * x.fold + tile * 128 // group_rows
    if ROUTED:
        rows = tl.where(chosen > 0, pairs // tl.maximum(chosen, 1), sorted_rows)
        rows = tl.where(live, rows, 0)
    rn = tile * 128 + tl.arange(0, 128)
    first_row = expert.to(tl.int64) * row_tiles + tile if ROUTED else tile.to(tl.int64)
    WB: tl.constexpr = 128 if W8 or not A8 else 64
    CHUNKS: tl.constexpr = 1 if A8 else 4
    w = dd.select_matrix(m.words, m.firsts, pid, NUM).to(tl.pointer_type(tl.uint8))
    s = dd.select_matrix(m.scales, m.firsts, pid, NUM).to(tl.pointer_type(tl.uint8))
    w = tl.multiple_of(w + first_row * 128 * k_steps * WB, 128)
    s = tl.multiple_of(s + first_row * k_steps * (CHUNKS * 512), 128)
    total = _few_sum(
        w, s, x.codes, x.scales, rows.to(tl.int64), split * per_range,
        tl.minimum((split + 1) * per_range, k_steps), k_steps, BN, A8, W8, STAGES,
    )  # fmt: skip
    is_last = count > 0
    if count > 1:
        slot = tl.program_id(1) * tl.num_programs(0) + pid - split
        total, is_last = dd.finish_ranges(
            total, live, partials, counters, slot, split, count, 128, BN
        )
    at = dd.select_matrix(m.factors, m.firsts, pid, NUM).to(tl.pointer_type(tl.float32))
    at += expert * tl.cdiv(size, part_rows)
    factor = tl.load(at + rn // part_rows, mask=rn < size, other=0.0)
    total = total * factor[:, None]
    if not A8:
        total = total * tl.load(x.row_scale + rows, mask=live, other=0.0)[None, :]
    mask = (rn < tl.where(is_last, size, 0))[:, None] & live[None, :]
    offsets = out_rows.to(tl.int64)[None, :] * size + rn[:, None]
    out = dd.select_matrix(m.outs, m.firsts, pid, NUM)
    dd.store_typed(total, out, offsets, mask, dd.is_wide(m, pid, F32, NUM))


@triton.jit
def _many_sum(
    w_desc, s_desc, x_desc, xs_desc, row, scale_row, x_row, x_column, first, last,
    BN: tl.constexpr, A8: tl.constexpr, W8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like `_few_sum`, through descriptors; `x_column`: first column of a group's steps."""
    CHUNKS: tl.constexpr = 1 if A8 else 4
    WB: tl.constexpr = 128 if W8 or not A8 else 64
    acc = tl.zeros((128, BN), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        w = w_desc.load([row, step * WB])
        x = x_desc.load([x_row, (x_column + step) * 128])
        s = s_desc.load([scale_row, step * CHUNKS, 0, 0])
        x_scale = xs_desc.load([x_row // 128, (x_column + step) * CHUNKS, 0, 0])
        x_scale = _untile(x_scale, BN // 128, CHUNKS)
        acc = _product(w, _untile(s, 1, CHUNKS), x.T, x_scale, acc, A8, W8)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _many_rows_kernel(
    w_desc, s_desc, x_desc, xs_desc, row_scale, num_rows, fold, group_rows, k_steps,
    factors, out, size, part_rows, count, per_range, groups,
    F32: tl.constexpr, ROUTED: tl.constexpr, TO_PAIRS: tl.constexpr, RANGES: tl.constexpr,
    BN: tl.constexpr, A8: tl.constexpr, W8: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One matrix (or stack) and BN rows; arguments as in `_few_rows_kernel`."""
    tile = tl.program_id(0)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    live = place < num_rows
    out_rows = place
    expert = 0
    if ROUTED:
        expert, live, sorted_rows, pairs = _tile_of(tl.program_id(1), groups, BN)
        if expert < 0:
            return
        out_rows = pairs if TO_PAIRS else sorted_rows
    group = tile * 128 // group_rows
    row_tile = expert * tl.cdiv(size, 128) + tile
    x_row = tl.program_id(1) * BN
    if RANGES == 1:
        total = _many_sum(
            w_desc, s_desc, x_desc, xs_desc, row_tile * 128, row_tile, x_row, group * k_steps,
            0, k_steps, BN, A8, W8, STAGES,
        )  # fmt: skip
    else:
        total = tl.zeros((128, BN), dtype=tl.float32)
        for index in tl.range(0, count):
            part = _many_sum(
                w_desc, s_desc, x_desc, xs_desc, row_tile * 128, row_tile, x_row,
                group * k_steps, index * per_range,
                tl.minimum((index + 1) * per_range, k_steps), BN, A8, W8, STAGES,
            )  # fmt: skip
            total = total + part
    rn = tile * 128 + tl.arange(0, 128)
    factors += expert * tl.cdiv(size, part_rows)
    factor = tl.load(factors + rn // part_rows, mask=rn < size, other=0.0)
    total = total * factor[:, None]
    if not A8:
        own = tl.load(row_scale + place * fold + group, mask=live, other=0.0)
        total = total * own[None, :]
    mask = (rn < size)[:, None] & live[None, :]
    offsets = out_rows.to(tl.int64)[None, :] * size + rn[:, None]
    dd.store_typed(total, out, offsets, mask, F32)


@dataclass(frozen=True)
class ScaledConfig:
    bn: int  # input rows per program
    num_warps: int
    num_stages: int
    few: bool  # the pointer variant


def choose_config(num_rows: int, num_ranges: int, gpu: Gpu) -> ScaledConfig:
    """Tile sizes; they do not change the order of summation."""
    for most in (16, 32, FEW_ROWS):
        if num_rows <= most:
            return ScaledConfig(most, 4, 4, True)
    # ranges need a second accumulator tile; without tensor memory sums are in registers
    if num_rows <= 512 or num_ranges > 1 or gpu.products == "mma":
        return ScaledConfig(128, 8, 3, False)
    return ScaledConfig(256, 8, 3, False)


def scaled_split_k(weight) -> tuple[int, int]:
    """Like `split_k`, in multiples of 256 columns."""
    return split_k(weight, RANGE_COLUMNS, num_scaled_ranges)


def num_scaled_ranges(rows: int, columns: int) -> tuple[int, int]:
    return num_ranges(rows, columns, RANGE_COLUMNS, WANTED_PROGRAMS, ROWS)


def _group_rows(rows, weight) -> int:
    return weight.rows // rows.fold if rows.fold > 1 else 2**30


def _steps(rows) -> tuple[int, int]:
    """(steps along K, steps per RANGE_COLUMNS)."""
    width = 128 if rows.a8 else 256
    return rows.columns // width, RANGE_COLUMNS // width


def launch_few(rows, weights, outs, config, *, grouped=None, to_pairs=False, chosen=0) -> None:
    num_rows = rows.num_rows // rows.fold
    k_steps, per_unit = _steps(rows)
    splits = [(1, k_steps) if grouped else scaled_split_k(w) for w in weights]
    splits = [(n, unit if grouped else unit * per_unit) for n, unit in splits]
    tiles = [triton.cdiv(w.rows, ROWS) for w in weights]
    programs = [n * count for n, (count, _) in zip(tiles, splits, strict=True)]
    grid = (sum(programs), grouped.num_tiles if grouped else triton.cdiv(num_rows, config.bn))
    size = grid[0] * grid[1] if any(count > 1 for count, _ in splits) else 1
    device = rows.codes.device
    partials = workspace(device, "partials", size * ROWS * config.bn, torch.float32)
    counters = workspace(device, "counters", size, torch.int32)
    factors = [w.global_scale for w in weights]
    sizes = [w.rows for w in weights]
    parts = [size // factor.shape[-1] for size, factor in zip(sizes, factors, strict=True)]
    data, scales = zip(*((w.data, w.scale) for w in weights), strict=True)
    _few_rows_kernel[grid](
        row_buffers(rows), num_rows, _group_rows(rows, weights[0]), k_steps,
        dd.matrices(data, scales, factors, outs, sizes, parts, programs, splits),
        partials, counters, (rows.codes,) if grouped is None else grouped.groups, chosen,
        NUM=len(weights), F32=sum(1 << i for i, o in enumerate(outs) if o.dtype == torch.float32),
        ROUTED=grouped is not None, TO_PAIRS=to_pairs, BN=config.bn, A8=rows.a8,
        W8=weights[0].element_bits == 8, STAGES=config.num_stages,
        **launch_options(config.num_warps),
    )  # fmt: skip


def launch_many(rows, weight, out, config, *, grouped=None, to_pairs=False) -> None:
    num_rows = rows.num_rows // rows.fold
    k_steps, per_unit = _steps(rows)
    count, units = (1, 0) if grouped else scaled_split_k(weight)
    width = rows.columns * rows.fold // (1 if rows.a8 else 2)
    chunks = 1 if rows.a8 else 4
    padded = triton.cdiv(num_rows, 2 * ROWS) * 2 * ROWS
    codes = rows.codes[: padded * width].view(padded, width)
    group_tiles = k_steps * chunks * rows.fold
    scales = rows.scales[: padded * group_tiles * 4].view(padded // ROWS, group_tiles, 2, 256)
    data = weight.data.view(-1, weight.data.shape[-1])
    w_scale = weight.scale.view(-1, *weight.scale.shape[-3:])
    tiles = triton.cdiv(weight.rows, ROWS)
    step_bytes = weight.data.shape[-1] // k_steps
    _many_rows_kernel[(tiles, grouped.num_tiles if grouped else triton.cdiv(num_rows, config.bn))](
        _descriptor(data, [ROWS, step_bytes], weight.element_bits == 8),
        _descriptor(w_scale, [1, chunks, 2, 256], not rows.a8),
        _descriptor(codes, [config.bn, 128], rows.a8),
        _descriptor(scales, [config.bn // ROWS, chunks, 2, 256], not rows.a8),
        rows.row_scale, num_rows, rows.fold, _group_rows(rows, weight), k_steps,
        weight.global_scale, out.data_ptr(), weight.rows,
        weight.rows // weight.global_scale.shape[-1], count, units * per_unit,
        (rows.codes,) if grouped is None else grouped.groups,
        F32=out.dtype == torch.float32, ROUTED=grouped is not None, TO_PAIRS=to_pairs,
        RANGES=count, BN=config.bn, A8=rows.a8, W8=weight.element_bits == 8,
        STAGES=config.num_stages, **launch_options(config.num_warps),
    )  # fmt: skip


def _descriptor(tensor, block, e4m3: bool):
    tensor = tensor.view(torch.float8_e4m3fn) if e4m3 else tensor
    return TensorDescriptor.from_tensor(tensor, block)
