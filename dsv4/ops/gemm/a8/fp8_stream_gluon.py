# mypy: ignore-errors
"""FP8 products of up to eight rows on sm_90 that keep weights streaming, in Gluon: a launch for
several matrices, which quantises the rows itself.

Weights are in the M slot of `wgmma`, eight rows wide; sums and their order are those of
fp8_product_triton.py, so bits are equal. A program copies weights into a ring before it waits for
the previous launch (gemm/variants/stream_gluon.py), then quantises its columns of the rows, in
shared memory. Of a single row only one line of eight is written: the others' sums are not stored.

The next launch may start only after this one's wait: a launch may rely on it to read results from
two launches back.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import dot_device as dd
from dsv4.ops.gemm.a8.fp8_prompt_gluon import sums_layout
from dsv4.ops.gemm.a8.unpack_mxfp4_device import viewed
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.variants.prompt_gluon import quantized
from dsv4.ops.gemm.variants.stream_gluon import (
    OUT,
    ROWS,
    SHARED_BYTES,
    TILE,
    add_ranges,
    barrier,
    begin_copy,
    commit_group,
    select,
    store_sums,
    wait_group,
)

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))  # what wgmma reads
COPY = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
FEW = gl.constexpr(gl.BlockedLayout([1, 1, 32], [1, 8, 4], [4, 1, 1], [2, 1, 0]))  # of eight rows


@gluon.constexpr_function
def row_layout(most):
    """Steps and columns of a row. No two threads load the same numbers: all programs want these."""
    wide = min(most, 32)
    return gl.BlockedLayout([1, wide], [wide // 4, 128 // wide], [4, 1], [1, 0])


@gluon.jit
def quantize_row(x, factor, steps, MOST: gl.constexpr):
    """A row of `steps` (at most MOST) times 128 columns in shared memory: codes `[8, 128]` for each
    step, of which only the first line is written, and scales times `factor`."""
    codes = gl.allocate_shared_memory(gl.float8e4nv, [MOST, ROWS, 128], SHARED)
    factors = gl.allocate_shared_memory(
        gl.float32, [MOST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    ROW: gl.constexpr = row_layout(MOST)
    step = gl.expand_dims(gl.arange(0, MOST, layout=gl.SliceLayout(1, ROW)), 1)
    at = step * 128 + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, ROW)), 0)
    value = gl.load(x + at, mask=at < steps * 128, other=0.0, cache_modifier=".cg")
    code, scale = quantized(value.to(gl.float32), 1)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    lines = viewed(codes, gl.float8e4nv, [MOST, ROWS * 128], PLAIN)
    lines.slice(0, 128, dim=1).store(code)
    column: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    viewed(factors, gl.float32, [MOST], column).store(scale * factor)
    return codes, factors


@gluon.jit
def _quantize_rows(x, x_stride, num_rows, factors_at, steps, MOST: gl.constexpr):
    """Like `quantize_row`, of up to eight rows; `factors_at`: where the factors of steps are."""
    codes = gl.allocate_shared_memory(gl.float8e4nv, [MOST, ROWS, 128], SHARED)
    factors = gl.allocate_shared_memory(
        gl.float32, [MOST, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    PARTS: gl.constexpr = MOST // 4
    chunks = viewed(codes, gl.float8e4nv, [PARTS, 4 * ROWS, 128], SHARED)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = viewed(factors, gl.float32, [PARTS, 4, ROWS], PLAIN)
    OF_STEPS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, FEW))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, FEW)))
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, FEW)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 1)
    for part in gl.static_range(PARTS):
        own = part * 4 + gl.arange(0, 4, layout=OF_STEPS)
        factor = gl.load(factors_at + own, mask=own < steps, other=0.0)
        step = gl.expand_dims(gl.expand_dims(own, 1), 2)
        mask = (row < num_rows) & (step < steps) & (column >= 0)
        at = row * x_stride + step * 128 + column
        value = gl.load(x + at, mask=mask, other=0.0, cache_modifier=".cg")
        code, scale = quantized(value.to(gl.float32), 2)
        chunks.index(part).store(code.reshape([4 * ROWS, 128]))
        scales.index(part).store(scale * gl.expand_dims(factor, 1))
    return codes, factors


@gluon.jit
def start_product(weights, codes, step):
    zeros = gl.zeros([TILE, ROWS], gl.float32, sums_layout(ROWS))
    row = codes.index(step).permute((1, 0))
    return warpgroup_mma(weights, row, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_product(sums, product, factors, step, LATER: gl.constexpr):
    """Add a step's product times its factors, one or eight, while LATER ones go on."""
    factor = factors.index(step).load(gl.SliceLayout(0, sums_layout(ROWS)))
    part = warpgroup_mma_wait(LATER, deps=(product,))
    return part * gl.expand_dims(factor, 0) + sums


@gluon.jit
def _copy_turn(room, weight, row_at, turn, STAGES: gl.constexpr):
    """Copy 128 columns of 64 rows into their place in the ring."""
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(row_at, 1) + gl.expand_dims(turn * 128 + column, 0)
    begin_copy(room.index(turn % STAGES), weight + at)


@gluon.jit(do_not_specialize=["num_rows"])
def a8_stream(
    x, x_stride, num_rows, num_columns, total_steps,
    words, scales, outs, sizes, firsts, ranges, range_steps, partials, counters,
    NUM: gl.constexpr, F32: gl.constexpr, ONE: gl.constexpr, PARTIAL: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, PAD: gl.constexpr, MOST: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """MOST: steps of a range, rounded up. PARTIAL: each range's sum is stored by itself. WHOLE: a
    program's weights, an even number of steps, fit the ring."""
    pid = gl.program_id(0)
    size = select(sizes, firsts, pid, NUM)
    count = select(ranges, firsts, pid, NUM)
    per_range = select(range_steps, firsts, pid, NUM)
    tile = pid - select(firsts, firsts, pid, NUM)
    split = tile % count
    tile = tile // count
    first = split * per_range
    steps = gl.minimum(per_range, total_steps - first)
    w = select(words, firsts, pid, NUM).to(gl.pointer_type(gl.float8e4nv))
    row = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY))
    row_at = row.to(gl.int64) * num_columns + first * 128
    w = gl.multiple_of(w, 16)
    room = gl.allocate_shared_memory(gl.float8e4nv, [STAGES + PAD, TILE, 128], SHARED)
    for turn in gl.static_range(STAGES if WHOLE else STAGES - 1):
        if turn < steps:
            _copy_turn(room, w, row_at, turn, STAGES)
        commit_group()
    factors_at = select(scales, firsts, pid, NUM).to(gl.pointer_type(gl.float32))
    factors_at += tile // 2 * total_steps + first
    x += first * 128
    if ONE:
        own = gl.arange(0, MOST, layout=gl.SliceLayout(1, row_layout(MOST)))
        factor = gl.load(factors_at + own, mask=own < steps, other=0.0)
        gdc_wait()
        gdc_launch_dependents()
        codes, factors = quantize_row(x, factor, steps, MOST)
    else:
        gdc_wait()
        gdc_launch_dependents()
        codes, factors = _quantize_rows(x, x_stride, num_rows, factors_at, steps, MOST)
    total = gl.zeros([TILE, ROWS], gl.float32, sums_layout(ROWS))
    if WHOLE:
        wait_group(0)
        fence_async_shared()
        barrier()
        for step in range(0, steps, 2):
            product = start_product(room.index(step), codes, step)
            later = start_product(room.index(step + 1), codes, step + 1)
            total = add_product(total, product, factors, step, 1)
            total = add_product(total, later, factors, step + 1, 0)
    else:
        for turn in range(0, steps):
            wait_group(STAGES - 2)
            fence_async_shared()
            barrier()
            if turn + STAGES - 1 < steps:  # over the previous turn's weights
                _copy_turn(room, w, row_at, turn + STAGES - 1, STAGES)
            commit_group()
            product = start_product(room.index(turn % STAGES), codes, turn)
            total = add_product(total, product, factors, turn, 0)
    total = gl.convert_layout(total, OUT)
    is_last = count > 0
    if SPLIT:  # noqa: SIM102 - a branch that never runs does not compile
        if count > 1:
            total, is_last = add_ranges(total, num_rows, partials, counters, pid, split, count)
    first_row = split * 0
    if PARTIAL:
        first_row = split * num_rows
    store_sums(total, outs, firsts, pid, tile, first_row, num_rows, size, is_last, NUM, F32)


def multiply(x, weights, outs, *, partial=False) -> None:
    """`outs` `[rows, n]` = rows `x` times FP8 matrices that `fits_stream` allows. `partial`: outs
    are fp32 `[ranges, rows, n]`."""
    num_rows, columns = x.shape
    splits = [split_k(w) for w in weights]
    programs = [w.shape[0] // 64 * count for w, (count, _) in zip(weights, splits, strict=True)]
    total = sum(programs)
    split = not partial and any(count > 1 for count, _ in splits)
    size = total if split else 1
    partials = workspace(x.device, "a8_partials", size * 64 * 8, torch.float32)
    counters = workspace(x.device, "a8_counters", size, torch.int32)
    scales = [w.scale for w in weights]
    sizes = [w.shape[0] for w in weights]
    m = dd.matrices([w.data for w in weights], scales, scales, outs, sizes, sizes, programs, splits)
    lengths = [n for c, n in splits for n in (n, columns // 128 - (c - 1) * n)]
    most = max(4, triton.next_power_of_2(max(lengths)))
    share = SHARED_BYTES // -(-total // describe(x.device).multiprocessors)
    stages = (share - 1024 - most * (8 * 128 + 32)) // 8192
    whole = max(lengths) <= stages and not any(length % 2 for length in lengths)
    a8_stream[(total,)](
        x, x.stride(0), num_rows, columns, columns // 128, m.words, m.scales, m.outs, m.sizes,
        m.firsts, m.ranges, m.range_steps, partials, counters, NUM=len(weights),
        F32=sum(1 << i for i, out in enumerate(outs) if out.dtype == torch.float32),
        ONE=num_rows == 1, PARTIAL=partial, SPLIT=split, MOST=most, WHOLE=whole,
        STAGES=max(lengths) if whole else max(stages, 3),
        PAD=stages - max(lengths) if whole else 0, launch_pdl=True, num_warps=4,
    )  # fmt: skip
