# mypy: ignore-errors
"""FP8 products of a8 rows for prompts on sm_90, in Gluon: input rows in the tensor core's M slot.

A program walks over tiles of 128 weight rows by 128 or 192 input rows. One warp copies both into a
ring of buffers; two or three groups of four warps multiply 64 input rows each, by `piece` weight
rows at a time. A thread's sums belong to two input rows, so a step has two scales of rows a thread,
which it reads itself, a step ahead, and no load has to be fenced before a buffer is given back.
Results leave through shared memory as copies, which go on while the next tile is multiplied.

Sums and their order are those of fp8_product_triton.py, and `wgmma` gives the same bits with
operands in each other's place. The interpreter does not run Gluon; a GPU test compares both to the
last bit.
"""

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
from dsv4.ops.core.helpers_device import append
from dsv4.ops.gemm.split_k import split_k

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
joined = gluon.jit(append.fn)
ROWS, WIDTH = gl.constexpr(64), gl.constexpr(128)  # input rows of a product, weight rows of a tile
COPY_BYTES = 128  # of a row of results
ADD = gl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
WARPS, COPY_REGISTERS = 4, 24
REGISTERS = {2: 240, 3: 160}  # of a multiplying thread, by `groups`


class PromptTile(NamedTuple):
    """Constants of a launch."""

    piece: int  # weight rows of a product
    flight: int  # products in the tensor core while another's sums are added
    stages: int
    registers: bool  # input rows are multiplied from registers
    band: int  # tiles of weight rows that all rows are multiplied by before others
    groups: int  # of four warps that multiply
    ranges: int = 1


MATRIX = PromptTile(128, 1, 4, False, 32, 3)
RANGES = PromptTile(64, 2, 6, True, 16, 2)  # a second set of sums in registers


class PromptBuffers(NamedTuple):
    """A ring of `stages`; which buffers are filled, which are free again; results of a group."""

    rows: object
    weights: object
    full: object
    empty: object
    results: object
    out: object


class PromptJob(NamedTuple):
    """What is multiplied."""

    row_scales: object  # [steps, stride]
    stride: int
    scale: object  # of weights
    num_rows: int
    weight_rows: int
    n_tiles: int
    m_tiles: int
    items: int
    steps: int
    per_range: int


@gluon.constexpr_function
def sums_layout(piece):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, piece, 32])


@gluon.constexpr_function
def outstanding(flight, left):
    """Products that may go on when the first of `left` is awaited."""
    return min(flight, left) - 1


@gluon.jit
def _work(item, job, T: gl.constexpr):
    """(tile of weight rows, tile of input rows), in bands."""
    band = item // (T.band * job.m_tiles)
    first = band * T.band
    width = gl.minimum(job.n_tiles - first, T.band)
    inside = item - first * job.m_tiles
    return first + inside % width, inside // width


@gluon.jit
def _copy(x_desc, w_desc, b, job, T: gl.constexpr):
    """The job of the copying warp."""
    GROUPS: gl.constexpr = T.groups
    PIECES: gl.constexpr = WIDTH // T.piece
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        n_tile, m_tile = _work(item, job, T)
        for step in range(0, job.steps):
            slot = at % T.stages
            full = b.full.index(slot)
            mbarrier.wait(b.empty.index(slot), (at // T.stages + 1) & 1)
            mbarrier.expect(full, (GROUPS * ROWS + WIDTH) * 128)
            for i in gl.static_range(GROUPS):
                place = [(m_tile * GROUPS + i) * ROWS, step * 128]
                tma_load(x_desc, place, full, b.rows.index(slot * GROUPS + i))
            for i in gl.static_range(PIECES):
                place = [n_tile * WIDTH + i * T.piece, step * 128]
                tma_load(w_desc, place, full, b.weights.index(slot * PIECES + i))
            at += 1


@gluon.jit
def _load_scales(group, tile, step, job, T: gl.constexpr):
    """(of rows, of weights) in a step. Rows beyond the last have its scale, and are not stored."""
    step = gl.minimum(step, job.steps - 1)
    row = (tile[1] * T.groups + group) * ROWS
    row += gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(T.piece)))
    row = gl.minimum(row, job.num_rows - 1)
    of_rows = gl.load(job.row_scales + step * job.stride + row)
    n = gl.minimum(tile[0] * WIDTH // 128, job.weight_rows // 128 - 1)
    return of_rows, gl.load(job.scale + n * job.steps + step)


@gluon.jit
def _operand(group, slot, b, T: gl.constexpr):
    """E4M3 `[64, 128]` of this group's input rows."""
    rows = b.rows.index(slot * T.groups + group)
    if T.registers:
        rows = rows.load(gl.DotOperandLayout(0, sums_layout(T.piece), 4))
    return rows


@gluon.jit
def _start(rows, slot, old, b, job, NUMBER: gl.constexpr, T: gl.constexpr):
    """The product of a step's input rows and of its weights' piece NUMBER.

    It overwrites `old`, which the compiler must not know to be unused: otherwise each product of a
    step gets its own registers, and what it adds to is added after the next product."""
    w = b.weights.index(slot * (WIDTH // T.piece) + NUMBER).permute((1, 0))
    return warpgroup_mma(rows, w, old, use_acc=job.num_rows < 0, is_async=True)


@gluon.jit
def _zeros(COUNT: gl.constexpr, T: gl.constexpr):
    zeros = ()
    PIECE: gl.constexpr = T.piece
    for _ in gl.static_range(COUNT):
        zeros = joined(zeros, gl.zeros([ROWS, PIECE], gl.float32, sums_layout(PIECE)))
    return zeros


@gluon.jit
def add_scaled(part, factor, sums):
    """`part` times its rows' factors, plus `sums`."""
    given = [part, gl.expand_dims(factor, 1), sums]
    return gl.inline_asm_elementwise(ADD, "=f,f,f,f", given, gl.float32, False, 1)


@gluon.jit
def _stay(slot, b, job):
    """Never waits; the compiler does not mix instructions before and after it."""
    if job.num_rows < 0:
        mbarrier.wait(b.full.index(slot), 0)


@gluon.jit
def _step(group, at, parts, sums, total, scales, tile, b, job, STORE: gl.constexpr,
          T: gl.constexpr):  # fmt: skip
    """(registers of the last products, new sums). With STORE results leave as they come, while the
    next products of this last step run."""
    COUNT: gl.constexpr = WIDTH // T.piece
    FLIGHT: gl.constexpr = T.flight
    slot = at % T.stages
    mbarrier.wait(b.full.index(slot), at // T.stages & 1)
    rows = _operand(group, slot, b, T)
    flying = ()
    for i in gl.static_range(FLIGHT):
        flying = joined(flying, _start(rows, slot, parts[i], b, job, i, T))
    added = ()
    later = ()
    for i in gl.static_range(COUNT):
        part = warpgroup_mma_wait(outstanding(FLIGHT, COUNT - i), deps=(flying[i],))
        if i == COUNT - 1:
            mbarrier.arrive(b.empty.index(slot), count=1)
        value = add_scaled(part, scales[0] * scales[1], sums[i])
        if i + FLIGHT < COUNT:
            _stay(slot, b, job)
            flying = joined(flying, _start(rows, slot, part, b, job, i + FLIGHT, T))
        else:
            later = joined(later, part)
        added = joined(added, value)
        if STORE:
            if T.ranges > 1:
                value = total[i] + value
            row = (tile[1] * T.groups + group) * ROWS
            _store(value, row, tile[0] * WIDTH, group, b, i * T.piece)
    return later, added


@gluon.jit
def _range(group, at, scales, tile, next_tile, begin, end, total, b, job, STORE: gl.constexpr,
           T: gl.constexpr):  # fmt: skip
    """(fp32 `[64, piece]` per product over the steps `begin` to `end`, the next step's scales)."""
    sums = _zeros(WIDTH // T.piece, T)
    parts = _zeros(T.flight, T)
    for step in range(begin, end - 1):
        next_scales = _load_scales(group, tile, step + 1, job, T)
        parts, sums = _step(group, at, parts, sums, total, scales, tile, b, job, False, T)
        scales = next_scales
        at += 1
    if STORE:
        next_scales = _load_scales(group, next_tile, 0, job, T)
    else:
        next_scales = _load_scales(group, tile, end, job, T)
    parts, sums = _step(group, at, parts, sums, total, scales, tile, b, job, STORE, T)
    return sums, next_scales


@gluon.jit
def _multiply_tile(group, at, scales, tile, next_tile, b, job, T: gl.constexpr):
    """All ranges of K, added in order; returns the next tile's first scales."""
    COUNT: gl.constexpr = WIDTH // T.piece
    total = ()
    begin = 0
    if T.ranges > 1:
        total = _zeros(COUNT, T)
        for index in range(0, T.ranges - 1):
            begin = index * job.per_range
            sums, scales = _range(
                group, at + begin, scales, tile, tile, begin, begin + job.per_range, total, b, job,
                False, T,
            )  # fmt: skip
            added = ()
            for i in gl.static_range(COUNT):
                added = joined(added, total[i] + sums[i])
            total = added
        begin = (T.ranges - 1) * job.per_range
    _, scales = _range(
        group, at + begin, scales, tile, next_tile, begin, job.steps, total, b, job, True, T
    )
    return scales


@gluon.jit
def _store(value, row, column, group, b, OFFSET: gl.constexpr):
    """Copies a line of 128 bytes wide, from two buffers in turn."""
    COLUMNS: gl.constexpr = value.shape[1]
    CHUNK: gl.constexpr = b.results.shape[2]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        halves = gl.split(gl.permute(value.reshape([ROWS, 2, HALF]), [0, 2, 1]))
        _store(halves[0], row, column, group, b, OFFSET)
        _store(halves[1], row, column, group, b, OFFSET + HALF)
    else:
        value = gl.convert_layout(value, sums_layout(COLUMNS), assert_trivial=True)
        buffer = b.results.index(group * 2 + OFFSET // CHUNK % 2)
        tma.store_wait(1)
        buffer.store(value.to(b.out.dtype))
        fence_async_shared()
        tma_store(b.out, [row, column + OFFSET], buffer)


@gluon.jit
def _multiply(group, b, job, T: gl.constexpr):
    """The job of a multiplying warpgroup."""
    at = 0
    tile = _work(gl.program_id(0), job, T)
    scales = _load_scales(group, tile, 0, job, T)
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        next_tile = _work(gl.minimum(item + gl.num_programs(0), job.items - 1), job, T)
        scales = _multiply_tile(group, at, scales, tile, next_tile, b, job, T)
        tile = next_tile
        at += job.steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "n_tiles", "m_tiles", "steps", "per_range", "stride"])
def _a8_prompt_kernel(
    x_desc, w_desc, out_desc, row_scales, stride, scale, num_rows, weight_rows, n_tiles, m_tiles,
    steps, per_range, T: gl.constexpr, NUM_REGISTERS: gl.constexpr,
    NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = T.stages
    ROW_BUFFERS: gl.constexpr = STAGES * T.groups
    PIECE: gl.constexpr = T.piece
    PIECES: gl.constexpr = STAGES * (WIDTH // PIECE)
    CHUNK: gl.constexpr = out_desc.block_shape[1]
    b = PromptBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [ROW_BUFFERS, ROWS, 128], SHARED),
        gl.allocate_shared_memory(gl.float8e4nv, [PIECES, PIECE, 128], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(out_desc.dtype, [2 * T.groups, ROWS, CHUNK], out_desc.layout),
        out_desc,
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=T.groups)
    job = PromptJob(
        row_scales, stride, scale, num_rows, weight_rows, n_tiles, m_tiles, n_tiles * m_tiles,
        steps, per_range,
    )  # fmt: skip
    if T.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, b, job, T)), (_multiply, (1, b, job, T)),
                (_copy, (x_desc, w_desc, b, job, T)),
            ],
            [4, 1], [NUM_REGISTERS, NUM_COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, b, job, T)), (_multiply, (1, b, job, T)),
                (_multiply, (2, b, job, T)), (_copy, (x_desc, w_desc, b, job, T)),
            ],
            [4, 4, 1], [NUM_REGISTERS, NUM_REGISTERS, NUM_COPY_REGISTERS],
        )  # fmt: skip


def multiply_rows(rows, weight, out, tile=None) -> None:
    """`out` `[rows, n]` = a8 rows times an FP8 matrix whose sides are multiples of 128."""
    ranges, per_range = split_k(weight)
    tile = (tile or (MATRIX if ranges == 1 else RANGES))._replace(ranges=ranges)
    shared = gl.NVMMASharedLayout(128, 8, 2)
    size = out.dtype.itemsize
    chunk = COPY_BYTES // size
    results = gl.NVMMASharedLayout(COPY_BYTES, 8 * size, 2)
    n_tiles = weight.shape[0] // 128
    m_tiles = triton.cdiv(rows.num_rows, 64 * tile.groups)
    programs = min(describe(out.device).multiprocessors, m_tiles * n_tiles)
    _a8_prompt_kernel[(programs,)](
        TensorDescriptor.from_tensor(rows.codes, [64, 128], shared),
        TensorDescriptor.from_tensor(weight.data, [tile.piece, 128], shared),
        TensorDescriptor.from_tensor(out, [64, chunk], results),
        rows.scales, rows.scales.stride(0), weight.scale, rows.num_rows, weight.shape[0], n_tiles,
        m_tiles, rows.num_steps, per_range, T=tile, NUM_REGISTERS=REGISTERS[tile.groups],
        NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
