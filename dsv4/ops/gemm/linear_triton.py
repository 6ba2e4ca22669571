# mypy: ignore-errors
"""`linear` on a GPU: up to eight matrices of one format per launch, weights in the MMA's M slot.

A program computes BN outputs for BM rows. With few rows it uses split-K: each range of K has its
own program, and the last to finish adds the ranges. With many rows one program loops over all
ranges. Same sums, same bits.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.formats.quantized import Fp8BlockTensor, UnpackedTensor
from dsv4.ops.core.gpu import Gpu, describe
from dsv4.ops.core.helpers_device import converts_e4m3
from dsv4.ops.core.launch import device_reason, interpreting, launch_options, rows_reason, streams
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import dot_device as dd
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.weights.expand_fp8_triton import expand_fp8
from dsv4.ops.gemm.weights.expand_triton import expand
from dsv4.ops.gemm.weights.tiled import TiledNvfp4

MAX_MATRICES = 8
STREAM_ROWS, STREAM_PROGRAMS = 8, 1024
NVFP4, BF16, FP8, EXPANDED = 0, 1, 2, 3
EXPAND_ROWS, EXPAND_COLUMNS = 1024, 1024  # from here on weights are dequantised to bf16 first


class LinearTile(NamedTuple):
    """Constants of a launch: a program's tile, and the format of its weights."""

    kind: int
    bm: int
    bn: int
    bk: int  # columns of an FP8 product
    block: int  # an FP8 tile has `tile_rows` x `block` weights
    tile_rows: int
    stages: int
    variant: int
    even_k: bool
    e8m0: bool
    asm: bool


@triton.jit
def _range_sum(
    words, scales, tile, live_n, x, x_rows, live_m, first, last, total_steps, num_columns,
    L: tl.constexpr,
):  # fmt: skip
    """The sum over one range of K, for any format; `words` and `scales` are addresses."""
    row = tile.to(tl.int64) * L.bn
    if L.kind == 0:
        w = words.to(tl.pointer_type(tl.int16)) + row * total_steps * 32
        s = scales.to(tl.pointer_type(tl.int16)) + row * total_steps * 4
        acc = dd.dot_nvfp4(
            tl.multiple_of(w, 64), tl.multiple_of(s, 64), x, (x_rows,), (live_m,), first, last,
            total_steps, num_columns, L.bn, L.stages, L.variant, L.even_k, L.asm,
        )[0]  # fmt: skip
    elif L.kind == 3:
        w = words.to(tl.pointer_type(tl.bfloat16)) + row * total_steps * 128
        acc = dd.dot_expanded(
            tl.multiple_of(w, 64), x, x_rows, live_m, first, last, total_steps, num_columns,
            L.bn, L.bm, L.stages, L.even_k,
        )  # fmt: skip
    elif L.kind == 1:
        w = tl.multiple_of(words.to(tl.pointer_type(tl.bfloat16)), 16) + row * num_columns
        acc = dd.dot_bf16(
            w, live_n, x, x_rows, live_m, first, last, num_columns, L.bn, L.bm, L.stages, L.even_k
        )
    else:
        BYTE: tl.constexpr = tl.float8e4nv if converts_e4m3() else tl.uint8
        w = tl.multiple_of(words.to(tl.pointer_type(BYTE)), 16) + row * num_columns
        SCALE: tl.constexpr = tl.uint8 if L.e8m0 else tl.float32
        s = scales.to(tl.pointer_type(SCALE))
        scale_rows = (row + tl.arange(0, L.bn)) // L.tile_rows * tl.cdiv(num_columns, L.block)
        acc = dd.dot_fp8(
            w, s, scale_rows, live_n, x, x_rows, live_m, first, last, num_columns,
            L.bn, L.bm, L.bk, L.block, L.stages, L.even_k, L.e8m0,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["num_rows", "first_range"])
def _linear_kernel(
    x, x_stride, num_rows, num_columns, group_rows, total_steps, m, first_range, partials,
    counters, NUM: tl.constexpr, F32: tl.constexpr, PARALLEL: tl.constexpr,
    SWIZZLE: tl.constexpr, PARTIAL: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """`F32`: see `is_wide`. SWIZZLE row tiles run concurrently, for L2 reuse. PARTIAL: each range's
    partial sum is stored separately (NVFP4: times 128), for `PartialSums`; `x` begins at the
    columns of range `first_range`."""
    BN: tl.constexpr = L.bn
    BM: tl.constexpr = L.bm
    FP4: tl.constexpr = L.kind == 0 or L.kind == 3
    pid = tl.program_id(0)
    m_tile = tl.program_id(1)
    if SWIZZLE > 1:
        width = tl.num_programs(0) * SWIZZLE
        place = m_tile * tl.num_programs(0) + pid
        first_m = place // width * SWIZZLE
        side = tl.minimum(tl.num_programs(1) - first_m, SWIZZLE)
        m_tile = first_m + place % width % side
        pid = place % width // side
    size = dd.select_matrix(m.sizes, m.firsts, pid, NUM)
    count = dd.select_matrix(m.ranges, m.firsts, pid, NUM)
    per_range = dd.select_matrix(m.range_steps, m.firsts, pid, NUM)
    tile = pid - dd.select_matrix(m.firsts, m.firsts, pid, NUM)
    split = 0
    if PARALLEL:
        split = tile % count
        tile = tile // count
    words_at = dd.select_matrix(m.words, m.firsts, pid, NUM)
    scales_at = dd.select_matrix(m.scales, m.firsts, pid, NUM)
    rn = tile * BN + tl.arange(0, BN)
    live_n = rn < size
    rm = m_tile * BM + tl.arange(0, BM)
    live_m = rm < num_rows
    group = (tile * BN) // group_rows
    x_rows = rm * x_stride + group * num_columns
    from_range = split
    if PARTIAL:
        from_range = split + first_range
        x_rows -= first_range * per_range * 128
    if FP4:  # early: the first access misses the cache
        factors = dd.select_matrix(m.factors, m.firsts, pid, NUM).to(tl.pointer_type(tl.float32))
        part_rows = dd.select_matrix(m.parts, m.firsts, pid, NUM)
        factor = tl.load(factors + rn // part_rows, mask=live_n, other=0.0) * 128.0

    is_last = count > 0
    if PARALLEL:
        total = _range_sum(
            words_at, scales_at, tile, live_n, x, x_rows, live_m, from_range * per_range,
            tl.minimum((from_range + 1) * per_range, total_steps), total_steps, num_columns, L,
        )  # fmt: skip
        if (not PARTIAL) and count > 1:
            slot = m_tile * tl.num_programs(0) + pid - split
            total, is_last = dd.finish_ranges(
                total, live_m, partials, counters, slot, split, count, BN, BM
            )
    else:
        total = tl.zeros((BN, BM), dtype=tl.float32)
        for index in tl.range(0, count):
            part = _range_sum(
                words_at, scales_at, tile, live_n, x, x_rows, live_m, index * per_range,
                tl.minimum((index + 1) * per_range, total_steps), total_steps, num_columns, L,
            )  # fmt: skip
            total = total + part
    out_rows = rm.to(tl.int64)
    if PARTIAL:
        if FP4:
            total = total * 128.0
        out_rows += split * num_rows
    elif FP4:
        total = total * factor[:, None]
    out = dd.select_matrix(m.outs, m.firsts, pid, NUM)
    offsets = out_rows[None, :] * size + rn[:, None]
    mask = (rn < tl.where(is_last, size, 0))[:, None] & live_m[None, :]
    if F32 == 0:
        dd.store_typed(total, out, offsets, mask, False)
    elif F32 == 2**NUM - 1:
        dd.store_typed(total, out, offsets, mask, True)
    else:
        dd.store_typed(total, out, offsets, mask, dd.is_wide(m, pid, F32, NUM))


@dataclass(frozen=True)
class LinearConfig:
    bm: int  # input rows per program
    bn: int  # weight rows per program
    num_warps: int
    num_stages: int
    variant: int = 0  # product variant; see dot_nvfp4


def choose_config(num_rows: int, fmt: int, gpu: Gpu) -> LinearConfig:
    """Tile sizes; they change no bit of the result."""
    if gpu.products == "mma":
        return _choose_mma(num_rows, fmt)
    if fmt == NVFP4:
        table = (
            # variant 1 only with `wgmma`: `mma.sync` takes joined weights in another order
            (8, LinearConfig(8, 64, 2, 3)),
            (16, LinearConfig(16, 64, 4, 3, 1)),
            (32, LinearConfig(32, 64, 4, 3, 1)),
            (128, LinearConfig(64, 128, 4, 3, 1)),
        )
        last = LinearConfig(64, 128, 4, 3, 1)
    elif fmt == EXPANDED:
        table, last = (), LinearConfig(256, 128, 8, 3)
    else:
        # FP8 starts at 16 rows: with 8, Triton takes the columns in another order
        table = (
            (8 if fmt == BF16 else 0, LinearConfig(8, 64, 4, 5)),
            (16, LinearConfig(16, 64, 4, 5)),
            (32, LinearConfig(32, 64, 4, 4)),
            (64, LinearConfig(64, 64, 4, 4)),
        )
        last = LinearConfig(128, 128, 8, 3)
    return next((config for limit, config in table if num_rows <= limit), last)


def _choose_mma(num_rows: int, fmt: int) -> LinearConfig:
    """Operands and sums are in registers, with at most 99 KB of shared memory. The column order is
    the same for any number of rows; with joined weights, `mma` would use another."""
    if fmt == EXPANDED:
        return LinearConfig(128, 128, 8, 3)
    stages = 3 if fmt == NVFP4 else 4
    for most in (8, 16, 32):
        if num_rows <= most:
            return LinearConfig(most, 64, 2 if most <= 16 and fmt == NVFP4 else 4, stages)
    return LinearConfig(64, 64 if num_rows <= 64 or fmt == FP8 else 128, 4, 3)


def weight_format(weight) -> int | str:
    """The format's number, or why the kernels do not support the weight."""
    if isinstance(weight, TiledNvfp4):
        if weight.paired:
            return "weight is tiled in gate and up pairs, which only the experts read"
        return NVFP4
    if isinstance(weight, Fp8BlockTensor):
        if weight.block % 32 or not weight.data.is_contiguous():
            return f"FP8 tiles of {weight.block}, kernels read contiguous multiples of 32"
        return FP8
    weight = _values(weight)
    if isinstance(weight, torch.Tensor):
        if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            return f"weight is {weight.dtype}, kernels read contiguous bfloat16"
        return BF16
    return f"{type(weight).__name__} is in checkpoint order, kernels read what `repack` makes of it"


def supports(x, weights, out_dtypes) -> str | None:
    reason = device_reason(x.device) or rows_reason(x)
    if reason is not None:
        return reason
    if x.shape[0] * x.stride(0) >= 2**31:
        return f"x has {x.shape[0]} rows of {x.stride(0)}, kernels reach 2^31 elements"
    for weight, dtype in zip(weights, out_dtypes, strict=True):
        found = weight_format(weight)
        if isinstance(found, str):
            return found
        if dtype not in (torch.bfloat16, torch.float32):
            return f"results in {dtype}, kernels write bfloat16 and float32"
    return None


def run(x, weights, out_dtypes) -> list[torch.Tensor]:
    outs = results(x, weights, out_dtypes)
    fill(x, weights, outs)
    return outs


def results(x, weights, out_dtypes) -> list[torch.Tensor]:
    return [
        torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        for weight, dtype in zip(weights, out_dtypes, strict=True)
    ]


def fill(x, weights, outs) -> None:
    """Launch the matrices of each kind together, for any number of them."""
    order = sorted(range(len(weights)), key=lambda i: launch_key(weights[i]))
    for _, same in groupby(order, key=lambda i: launch_key(weights[i])):
        indices = list(same)
        for start in range(0, len(indices), MAX_MATRICES):
            chosen = indices[start : start + MAX_MATRICES]
            launch(x, [weights[i] for i in chosen], [outs[i] for i in chosen])


def launch_key(weight) -> tuple[int, int, int, bool]:
    """Matrices with the same key share a launch."""
    fmt = weight_format(weight)
    is_fp8 = fmt == FP8
    return (fmt, *weight.tile, weight.scale.dtype == torch.uint8) if is_fp8 else (fmt, 0, 0, False)


def launch(
    x, weights, outs, *, num_groups=1, config=None, parallel=None, partial=False, some=None
) -> None:
    """`y_i = x . W_i^T` into `outs`; with groups, x is `[rows, groups * k]` and each group of
    weight rows reads its own k columns. `partial`: outs are fp32 `[ranges, rows, n]`, for all
    ranges of K or for `some`; x then has only the columns of these."""
    fmt, tile_rows, block, e8m0 = launch_key(weights[0])
    num_rows, columns = x.shape[0], weights[0].shape[1]
    data = [_data(w) for w in weights]
    kind = fmt
    if expands(x, fmt, e8m0, columns, config):
        if fmt != BF16:
            data = (expand if fmt == NVFP4 else expand_fp8)(weights)
        kind, fmt = EXPANDED if fmt == NVFP4 else BF16, EXPANDED
    splits = [split_k(w) for w in weights]
    if (fmt, config, parallel, partial) == (EXPANDED, None, None, False) and streams(x.device):
        module = import_module("dsv4.ops.gemm.variants.prompt_gluon")
        factors = [w.global_scale if kind == EXPANDED else None for w in weights]
        if module.launch(x, data, outs, splits, factors, num_groups):
            return
    streaming = config is None and parallel is not False and _is_stream(x, weights, fmt)
    config = config or choose_config(num_rows, fmt, describe(x.device))
    if num_groups > 1 and weights[0].shape[0] // num_groups % config.bn:
        config = replace(config, bn=128)  # a program's rows must be in one group
    m_tiles = triton.cdiv(num_rows, config.bm)
    tiles = [triton.cdiv(w.shape[0], config.bn) for w in weights]
    if some is not None:
        splits = [(len(some), steps) for _, steps in splits]
    if streaming:
        parallel = True
    if parallel is None:
        # partial sums of many rows exceed the weights in bytes: split only if multiprocessors idle
        at_once = describe(x.device).multiprocessors
        least = at_once * 3 // 4 + 1 if fmt == EXPANDED else 2 * at_once
        parallel = m_tiles * sum(tiles) < least or all(count == 1 for count, _ in splits)
    programs = [n * (count if parallel else 1) for n, (count, _) in zip(tiles, splits, strict=True)]
    total = sum(programs)
    grid = (total, m_tiles)
    split = parallel and not partial and any(count > 1 for count, _ in splits)
    size = total * m_tiles if split else 1
    partials = workspace(x.device, "partials", size * config.bm * config.bn, torch.float32)
    counters = workspace(x.device, "counters", size, torch.int32)
    f32 = sum(1 << i for i, out in enumerate(outs) if out.dtype == torch.float32)
    factors = [w.global_scale if isinstance(w, TiledNvfp4) else _scale(w) for w in weights]
    sizes, is_fp4 = [w.shape[0] for w in weights], kind in (NVFP4, EXPANDED)
    pairs = zip(sizes, factors, strict=True)
    parts = [size // factor.shape[-1] if is_fp4 else 1 for size, factor in pairs]
    tile = LinearTile(
        kind, config.bm, config.bn, 128 if block % 128 == 0 else 32, max(block, 1),
        max(tile_rows, 1), config.num_stages, config.variant, columns % 128 == 0, e8m0,
        not interpreting(),
    )  # fmt: skip
    rows = (
        x, x.stride(0), num_rows, columns,
        weights[0].shape[0] // num_groups if num_groups > 1 else 2**30, triton.cdiv(columns, 128),
    )  # fmt: skip
    found = dd.matrices(data, map(_scale, weights), factors, outs, sizes, parts, programs, splits)
    sums = (0 if some is None else some.start, partials, counters)
    constants = {"NUM": len(weights), "F32": f32, "PARTIAL": partial}
    if streaming:
        name = "stream_gluon" if fmt == NVFP4 else "stream_stored_gluon"
        module = import_module(f"dsv4.ops.gemm.variants.{name}")
        module.launch(grid, (*rows, *found, *sums), splits, tile, SPLIT=split, **constants)
        return
    _linear_kernel[grid](
        *rows, found, *sums, PARALLEL=parallel, L=tile,
        SWIZZLE=8 if fmt == EXPANDED and not split else 1, **constants,
        **launch_options(config.num_warps),
    )  # fmt: skip


def _is_stream(x, weights, fmt: int) -> bool:
    """Whether to use the streams of gemm/variants: few rows, one if weights are not NVFP4, which
    they copy 16 bytes at a time."""
    if weights[0].shape[1] % 128 or fmt == EXPANDED or not streams(x.device):
        return False
    few = x.shape[0] <= (STREAM_ROWS if fmt == NVFP4 else 1)
    good = few and (fmt == NVFP4 or all(map(streams_stored, weights)))
    return good and x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


def streams_stored(weight) -> bool:
    """Whether `stream_stored_gluon` reads the weight. A long matrix, the head's, has so many
    programs that starting early gives nothing."""
    if isinstance(weight, Fp8BlockTensor):
        rows, columns = weight.tile
        if rows % 64 or columns != 128 or weight.scale.dtype != torch.uint8:
            return False
    rows, columns = weight.shape
    even = rows % 64 == columns % 128 == 0 and _data(weight).data_ptr() % 16 == 0
    return even and rows // 64 * split_k(weight)[0] <= STREAM_PROGRAMS


def expands(x, fmt: int, e8m0: bool, columns: int, config: LinearConfig | None) -> bool:
    """Whether to multiply weights as bf16, with the tiles for many rows. `mma` would take the
    columns of FP8 in another order."""
    if fmt == FP8 and (not e8m0 or describe(x.device).products == "mma"):
        return False
    if config is not None:
        return config.variant == EXPANDED
    return x.shape[0] >= EXPAND_ROWS and columns >= EXPAND_COLUMNS


def _data(weight):
    if isinstance(weight, TiledNvfp4):
        return weight.packed
    return weight.data if isinstance(weight, Fp8BlockTensor) else _values(weight)


def _scale(weight):
    weight = _values(weight)
    return weight if isinstance(weight, torch.Tensor) else weight.scale


def _values(weight):
    """The plain tensor of a matrix that differs only in its order of summation."""
    plain = isinstance(weight, UnpackedTensor) and weight.activations == "a16"
    return weight.values if plain else weight
