# mypy: ignore-errors
"""Products of prompts with weights in bf16, expanded or stored, on sm_90, in Gluon: up to six
matrices that read the same rows.

A program walks over tiles of 192 or 128 input rows by 128 weight rows. One warp copies both into a
ring of buffers, 64 columns at a time; three or two groups of four warps multiply 64 input rows
each, by whichever the last turn of the multiprocessors is better filled. K's ranges
have no end for the ring, which is always full. Results leave through shared memory as copies, which
go on while the next tile is multiplied. A tile's 128 columns are what a scale of a8 rows covers, so
a matrix may leave such rows instead (gemm/a8/fp8_rows_triton.py), rounded to bf16 first.

Sums and their order are those of linear_triton.py, and `wgmma` gives the same bits with operands in
each other's place. The interpreter does not run Gluon; a GPU test compares both to the last bit.
"""

from itertools import accumulate, groupby
from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.helpers_device import append, through_bf16
from dsv4.ops.gemm.a8.fp8_rows_triton import A8Rows
from dsv4.ops.gemm.quantize_rows_triton import scale_of

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
joined, stored = gluon.jit(append.fn), gluon.jit(through_bf16.fn)
scale_of_bits = gluon.jit(scale_of.fn)
MOST_MATRICES = 6
ROWS, WIDTH = gl.constexpr(64), gl.constexpr(128)  # input rows of a group, weight rows of a tile
COLUMNS = gl.constexpr(64)  # of a stage
COPY_BYTES = 128  # of a row of results
STAGES, REGISTERS, COPY_REGISTERS = {2: 6, 3: 4}, {2: 240, 3: 160}, 24  # by groups of four warps
COST = {2: 2.12, 3: 3.0}  # of a tile: rows of two groups are loaded for fewer products
BAND, GROUPED_BAND = 32, 8  # tiles of weight rows that all rows are multiplied by before others


class Buffers(NamedTuple):
    """A ring of stages; which buffers are filled, which are free again; results of a group."""

    rows: object
    weights: object
    full: object
    empty: object
    results: object


class Job(NamedTuple):
    """What is multiplied; of each matrix its first tile, ranges of K and stages in each, its size,
    and how many of its rows share a factor."""

    firsts: object
    ranges: object
    per_range: object
    sizes: object
    part_rows: object
    n_tiles: int
    m_tiles: int
    items: int
    stages: int  # of K
    group_tiles: int  # tiles of weight rows that read the same columns of x


@gluon.constexpr_function
def sums_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _work(item, job, BAND: gl.constexpr):
    """(tile of weight rows, tile of input rows), in bands."""
    band = item // (BAND * job.m_tiles)
    first = band * BAND
    width = gl.minimum(job.n_tiles - first, BAND)
    inside = item - first * job.m_tiles
    return first + inside % width, inside // width


@gluon.jit
def _copy(x_desc, matrices, b, job, BAND: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """The job of the copying warp."""
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        n_tile, m_tile = _work(item, job, BAND)
        column = n_tile // job.group_tiles * job.stages * COLUMNS
        for step in range(0, job.stages):
            slot = at % STAGES
            full = b.full.index(slot)
            mbarrier.wait(b.empty.index(slot), (at // STAGES + 1) & 1)
            mbarrier.expect(full, (GROUPS * ROWS + WIDTH) * COLUMNS * 2)
            for i in gl.static_range(GROUPS):
                place = [(m_tile * GROUPS + i) * ROWS, column + step * COLUMNS]
                tma_load(x_desc, place, full, b.rows.index(slot * GROUPS + i))
            for i in gl.static_range(len(matrices)):
                tile = n_tile - job.firsts[i]
                if (tile >= 0) & (n_tile < job.firsts[i + 1]):
                    place = [tile * WIDTH, step * COLUMNS]
                    tma_load(matrices[i], place, full, b.weights.index(slot))
            at += 1


@gluon.jit
def _multiply_tile(group, at, count, per_range, b, job, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """All ranges of K, added in order."""
    total = gl.zeros([ROWS, WIDTH], gl.float32, sums_layout(WIDTH))
    for index in range(0, count):
        begin = index * per_range
        end = gl.minimum(begin + per_range, job.stages)
        sums = gl.zeros([ROWS, WIDTH], gl.float32, sums_layout(WIDTH))
        for step in range(begin, end):
            slot = at % STAGES
            mbarrier.wait(b.full.index(slot), at // STAGES & 1)
            weights = b.weights.index(slot).permute((1, 0))
            rows = b.rows.index(slot * GROUPS + group)
            sums = warpgroup_mma(rows, weights, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=(sums,))
            # the product before this one is done
            mbarrier.arrive(b.empty.index((at + STAGES - 1) % STAGES), count=1, pred=step > begin)
            at += 1
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(b.empty.index((at + STAGES - 1) % STAGES), count=1)
        total = total + sums
    return total, at


@gluon.jit
def quantized(value, AXIS: gl.constexpr):
    """(E4M3 codes, scales) of fp32 values with 128 columns on the last axis, AXIS."""
    power, inverse = scale_of_bits(gl.max(value.to(gl.int32, bitcast=True) & 0x7FFFFFFF, AXIS))
    code = (value * gl.expand_dims(inverse, AXIS)).to(gl.float8e4nv)
    return code, ((power + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _quantize(total, row, tile, scales, stride):
    """Codes of a8 rows; the scales are stored."""
    code, scale = quantized(stored(total, True), 1)
    at = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(WIDTH)))
    gl.store(scales + tile * stride + at, scale, mask=at < stride)
    return code


@gluon.jit
def _store(value, row, column, out, group, b, OFFSET: gl.constexpr):
    """Copies a line of 128 bytes wide, from two buffers in turn."""
    SIZE: gl.constexpr = value.shape[1]
    CHUNK: gl.constexpr = b.results.shape[2]
    if SIZE > CHUNK:
        HALF: gl.constexpr = SIZE // 2
        halves = gl.split(gl.permute(value.reshape([ROWS, 2, HALF]), [0, 2, 1]))
        _store(halves[0], row, column, out, group, b, OFFSET)
        _store(halves[1], row, column, out, group, b, OFFSET + HALF)
    else:
        value = gl.convert_layout(value, sums_layout(SIZE), assert_trivial=True)
        buffer = b.results.index(group * 2 + OFFSET // CHUNK % 2)
        tma.store_wait(1)
        buffer.store(value.to(out.dtype))
        fence_async_shared()
        tma_store(out, [row, column + OFFSET], buffer)


@gluon.jit
def _scaled(total, factors, tile, size, part_rows):
    """Times the global scales of NVFP4 weights, which are expanded 128 times too small."""
    column = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, sums_layout(WIDTH)))
    factor = gl.load(factors + gl.minimum(column, size - 1) // part_rows) * 128.0
    return total * gl.expand_dims(factor, 0)


@gluon.jit
def _multiply(
    group, outs, factors, scales, b, job, BAND: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """The job of a multiplying warpgroup."""
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        n_tile, m_tile = _work(item, job, BAND)
        count, per_range = job.ranges[0], job.per_range[0]
        for i in gl.static_range(1, len(outs)):
            count = gl.where(n_tile >= job.firsts[i], job.ranges[i], count)
            per_range = gl.where(n_tile >= job.firsts[i], job.per_range[i], per_range)
        total, at = _multiply_tile(group, at, count, per_range, b, job, STAGES, GROUPS)
        for i in gl.static_range(len(outs)):
            tile = n_tile - job.firsts[i]
            if (tile >= 0) & (n_tile < job.firsts[i + 1]):
                row = (m_tile * GROUPS + group) * ROWS
                value = total
                if len(factors) > 0:
                    value = _scaled(total, factors[i], tile, job.sizes[i], job.part_rows[i])
                if len(scales) > 0:
                    value = _quantize(total, row, tile, scales[0], scales[1])
                _store(value, row, tile * WIDTH, outs[i], group, b, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m_tiles", "stages", "group_tiles"])
def _prompt_kernel(
    x_desc, w0, w1, w2, w3, w4, w5, out0, out1, out2, out3, out4, out5, factors, scales, firsts,
    ranges, per_range, sizes, part_rows, m_tiles, stages, group_tiles, NUM: gl.constexpr,
    BAND: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, NUM_REGISTERS: gl.constexpr,
    NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    CHUNK: gl.constexpr = out0.block_shape[1]
    b = Buffers(
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, COLUMNS], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDTH, COLUMNS], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(out0.dtype, [2 * GROUPS, ROWS, CHUNK], out0.layout),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=GROUPS)
    every = ((w0, out0), (w1, out1), (w2, out2), (w3, out3), (w4, out4), (w5, out5))
    matrices = ()
    outs = ()
    for i in gl.static_range(NUM):
        matrices = joined(matrices, every[i][0])
        outs = joined(outs, every[i][1])
    n_tiles = firsts[NUM]
    job = Job(
        firsts, ranges, per_range, sizes, part_rows, n_tiles, m_tiles, n_tiles * m_tiles, stages,
        group_tiles,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, outs, factors, scales, b, job, BAND, STAGES, GROUPS)),
                (_multiply, (1, outs, factors, scales, b, job, BAND, STAGES, GROUPS)),
                (_copy, (x_desc, matrices, b, job, BAND, STAGES, GROUPS)),
            ],
            [4, 1], [NUM_REGISTERS, NUM_COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, outs, factors, scales, b, job, BAND, STAGES, GROUPS)),
                (_multiply, (1, outs, factors, scales, b, job, BAND, STAGES, GROUPS)),
                (_multiply, (2, outs, factors, scales, b, job, BAND, STAGES, GROUPS)),
                (_copy, (x_desc, matrices, b, job, BAND, STAGES, GROUPS)),
            ],
            [4, 4, 1], [NUM_REGISTERS, NUM_REGISTERS, NUM_COPY_REGISTERS],
        )  # fmt: skip


class PromptMatrix(NamedTuple):
    values: object  # bf16 rows
    out: object  # rows, or those of a8; these of one matrix in bf16 alone
    split: tuple[int, int]  # ranges of K, steps of 128 columns in each
    factor: object  # None: values are as they are


def launch(x, data, outs, splits, factors, num_groups) -> bool:
    """`y_i = x . W_i^T` with `linear_triton`'s ranges of K; `data`: values in bf16, those of NVFP4
    without the global scales, their `factors`. False if copies cannot read them: rows must begin
    at multiples of 16 bytes."""
    columns = x.shape[1] // num_groups
    if columns % 128:
        return False
    matrices = [values.view(-1, columns) for values in data]
    if not all(map(_fits, (x, *matrices, *map(_values, outs)))):
        return False
    found = sorted(map(PromptMatrix, matrices, outs, splits, factors), key=_dtype)
    for _, same in groupby(found, key=_dtype):
        part = list(same)
        for start in range(0, len(part), MOST_MATRICES):
            _launch(x, part[start : start + MOST_MATRICES], num_groups)
    return True


def choose_groups(rows: int, n_tiles: int, multiprocessors: int) -> int:
    """The cheaper one, by turns that all multiprocessors take."""

    def cost(groups: int) -> float:
        return triton.cdiv(triton.cdiv(rows, 64 * groups) * n_tiles, multiprocessors) * COST[groups]

    return min(COST, key=cost)


def _values(out):
    return out.codes if isinstance(out, A8Rows) else out


def _dtype(matrix) -> str:
    return str(_values(matrix.out).dtype)


def _fits(rows) -> bool:
    return rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0


def _launch(x, matrices, num_groups) -> None:
    shared = gl.NVMMASharedLayout(128, 16, 2)
    size = _values(matrices[0].out).element_size()
    results = gl.NVMMASharedLayout(COPY_BYTES, 8 * size, 2)
    padded = [*matrices, *[matrices[0]] * (MOST_MATRICES - len(matrices))]
    block, chunk = [int(ROWS), int(COLUMNS)], [int(ROWS), COPY_BYTES // size]
    weights = [
        TensorDescriptor.from_tensor(m.values, [int(WIDTH), int(COLUMNS)], shared) for m in padded
    ]
    outs = [TensorDescriptor.from_tensor(_values(m.out), chunk, results) for m in padded]
    sizes = tuple(_values(m.out).shape[1] for m in matrices)
    tiles = [triton.cdiv(n, int(WIDTH)) for n in sizes]
    scaled, first = matrices[0].factor is not None, matrices[0].out
    scales = (first.scales, first.scales.stride(0)) if isinstance(first, A8Rows) else ()
    factors = tuple(m.factor for m in matrices) if scaled else ()
    part_rows = tuple(n // f.shape[-1] for n, f in zip(sizes, factors, strict=False))
    multiprocessors = describe(x.device).multiprocessors
    groups = choose_groups(x.shape[0], sum(tiles), multiprocessors)
    m_tiles = triton.cdiv(x.shape[0], int(ROWS) * groups)
    programs = min(multiprocessors, m_tiles * sum(tiles))
    per_step, columns = 128 // int(COLUMNS), matrices[0].values.shape[1]
    _prompt_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, block, shared), *weights, *outs, factors, scales,
        (0, *accumulate(tiles)), tuple(m.split[0] for m in matrices),
        tuple(m.split[1] * per_step for m in matrices), sizes, part_rows, m_tiles,
        columns // int(COLUMNS), sum(tiles) // num_groups, NUM=len(matrices),
        BAND=GROUPED_BAND if num_groups > 1 else BAND, GROUPS=groups, STAGES=STAGES[groups],
        NUM_REGISTERS=REGISTERS[groups], NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=4,
    )  # fmt: skip
