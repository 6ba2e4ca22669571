# mypy: ignore-errors
"""FP8 products of a8 rows for prompts on sm_90, in Gluon: warps with different jobs.

A program walks over tiles of 128 weight rows by up to 64 * `pieces` input rows. One warp copies
weights, rows and their scales into a ring of buffers. Two groups of four warps multiply 64 weight
rows each; they wait only for buffers, never for each other, so one unpacks and adds while the other
multiplies. The sums of 128 columns of 64 rows leave the tensor core while the next rows are in it.
Experts read as many pieces of 64 rows as they have.

Sums and their order are those of fp8_product_triton.py, so bits are equal. The interpreter does not
run Gluon; a GPU test compares both to the last bit.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.ops.core.gpu import describe
from dsv4.ops.gemm.a8.fp8_product_triton import PAIRS, PLAIN, SWIGLU
from dsv4.ops.gemm.a8.fp8_prompt_device import (
    BLOCK,
    PIECE,
    ROWS,
    WIDTH,
    PromptBuffers,
    PromptJob,
    PromptTile,
    multiply_tile,
    pass_turn,
)
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.weights.a8 import A8Fp8

PACKED = gl.constexpr(2 * 64 * (16 + 1) * 4)  # bytes of MXFP4 in 128 rows and columns
MATRIX = PromptTile(3, 4, 2, True, 1, PLAIN)
RANGES = PromptTile(2, 6, 2, True, 0, PLAIN, direct=True)  # a second set of sums in registers
EXPERTS = PromptTile(4, 4, 1, False, 1, PAIRS)
MOST_ROWS = EXPERTS.pieces * ROWS  # of a tile
WARPS, REGISTERS, COPY_REGISTERS = 4, 240, 24  # of a multiplying thread, of a copying one

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _work(item, job, T: gl.constexpr):
    """(expert, tile of weight rows, first input row, rows) of an item; expert -1: none."""
    n_tile = item % job.n_tiles
    m_tile = item // job.n_tiles
    if T.fp8:
        row = m_tile * (T.pieces * PIECE)
        return 0, n_tile, row, gl.minimum(job.num_rows - row, T.pieces * PIECE)
    else:
        expert = gl.load(job.groups.tile_expert + m_tile)
        row = gl.load(job.groups.tile_start + m_tile)
        end = gl.load(job.groups.tile_end + m_tile)
        return expert, n_tile, row, gl.minimum(end - row, T.pieces * PIECE)


@gluon.jit
def _copy_tile(descs, at, expert, n_tile, row, b, job, P: gl.constexpr, T: gl.constexpr):
    """Copies begin at multiples of 16 bytes: of four copies of the scales, one does."""
    steps = job.steps
    first = (expert * job.n_tiles + n_tile) * 2 * steps
    for step in range(0, steps):
        slot = at % T.stages
        full = b.full.index(slot)
        mbarrier.wait(b.empty.index(slot), (at // T.stages + 1) & 1)
        mbarrier.expect(full, P * PIECE * WIDTH + BLOCK * 4 + (WIDTH * WIDTH if T.fp8 else PACKED))
        tma_load(descs[1], [(row & 3) * steps + step, row & -4], full, b.scales.index(slot))
        if T.fp8:
            tma_load(descs[2], [n_tile * WIDTH, step * WIDTH], full, b.weights.index(slot))
        else:
            for half in gl.static_range(2):
                tile = first + half * steps + step
                tma_load(descs[2], [tile * 4, 0], full, b.words.index(slot * 2 + half))
                tma_load(descs[3], [tile, 0], full, b.shifts.index(slot * 2 + half))
        for i in gl.static_range(P):
            place = [row + i * PIECE, step * WIDTH]
            tma_load(descs[0], place, full, b.rows.index(slot * T.pieces + i))
        at += 1


@gluon.jit
def _copy(descs, b, job, T: gl.constexpr):
    """The job of the copying warp."""
    at = 0
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, row, height = _work(item, job, T)
        if expert >= 0:
            if T.pieces == 1 or height <= PIECE:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 1, T)
            elif T.pieces == 2 or height <= 2 * PIECE:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 2, T)
            elif T.pieces == 3 or height <= 3 * PIECE:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 3, T)
            else:
                _copy_tile(descs, at, expert, n_tile, row, b, job, 4, T)
            at += job.steps


@gluon.jit
def _multiply(half, b, job, T: gl.constexpr):
    """The job of a multiplying warpgroup."""
    at = 0
    if T.turns and half == 1:
        pass_turn(half)
    for item in range(gl.program_id(0), job.items, gl.num_programs(0)):
        expert, n_tile, row, height = _work(item, job, T)
        if expert >= 0:
            if T.pieces == 1 or height <= PIECE:
                multiply_tile(half, at, expert, n_tile, row, height, b, job, 1, T)
            elif T.pieces == 2 or height <= 2 * PIECE:
                multiply_tile(half, at, expert, n_tile, row, height, b, job, 2, T)
            elif T.pieces == 3 or height <= 3 * PIECE:
                multiply_tile(half, at, expert, n_tile, row, height, b, job, 3, T)
            else:
                multiply_tile(half, at, expert, n_tile, row, height, b, job, 4, T)
            at += job.steps


@gluon.jit(do_not_specialize=["num_rows", "n_tiles", "items", "steps", "per_range"])
def _a8_prompt_kernel(
    x_desc, scale_desc, w_desc, shift_desc, scale, factors, out, groups, token_weights,
    num_rows, size, n_tiles, items, steps, per_range, limit, T: gl.constexpr,
    NUM_REGISTERS: gl.constexpr, NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WEIGHTS: gl.constexpr = [T.stages, 128, 128] if T.fp8 else [1, 8, 128]
    WORDS: gl.constexpr = 1 if T.fp8 else 2 * T.stages
    b = PromptBuffers(
        gl.allocate_shared_memory(gl.float8e4nv, [T.stages * T.pieces, 64, 128], SHARED),
        gl.allocate_shared_memory(gl.float32, [T.stages, 1, BLOCK], FLAT),
        gl.allocate_shared_memory(gl.float8e4nv, WEIGHTS, SHARED),
        gl.allocate_shared_memory(gl.int32, [WORDS, 4, 256], FLAT),
        gl.allocate_shared_memory(gl.int32, [WORDS, 1, 64], FLAT),
        gl.allocate_shared_memory(gl.int64, [T.stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [T.stages, 1], BARRIER),
    )
    STAGES: gl.constexpr = T.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=2)
    job = PromptJob(
        scale, factors, out, groups, token_weights, num_rows, size, n_tiles, items, steps,
        per_range, limit,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (0, b, job, T)),
            (_multiply, (1, b, job, T)),
            (_copy, ((x_desc, scale_desc, w_desc, shift_desc), b, job, T)),
        ],
        [4, 1],
        [NUM_REGISTERS, NUM_COPY_REGISTERS],
    )


def _launch(rows, weight, out, tile, m_tiles, per_range, *, groups, weights, limit) -> None:
    shared, flat = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 2)
    x_desc = TensorDescriptor.from_tensor(rows.codes, [ROWS, 128], shared)
    scale_desc = TensorDescriptor.from_tensor(rows.scales, [1, 4 * ROWS], flat)
    if isinstance(weight, A8Fp8):
        descs = TensorDescriptor.from_tensor(weight.data, [128, 128], shared), scale_desc
        factors = weight.scale, weight.scale
    else:
        descs = (
            TensorDescriptor.from_tensor(weight.words.view(-1, 256), [4, 256], flat),
            TensorDescriptor.from_tensor(weight.shifts.view(-1, 64), [1, 64], flat),
        )
        factors = weight.factor, weight.factor
    n_tiles = weight.shape[-2] // 128
    programs = min(describe(out.device).multiprocessors, m_tiles * n_tiles)
    _a8_prompt_kernel[(programs,)](
        x_desc, scale_desc, *descs, *factors, out, (out,) if groups is None else groups,
        out if weights is None else weights, rows.num_rows, out.shape[1], n_tiles,
        m_tiles * n_tiles, rows.num_steps, per_range, limit, T=tile, NUM_REGISTERS=REGISTERS,
        NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip


def multiply_rows(rows, weight, out, tile=None) -> None:
    """`out` `[rows, n]` = a8 rows times an FP8 matrix whose sides are multiples of 128."""
    ranges, per_range = split_k(weight)
    tile = tile or (MATRIX if ranges == 1 else RANGES)
    fewer = out.dtype.itemsize // 4  # fp32 results need the shared memory of a stage
    tile = tile._replace(ranges=ranges, stages=tile.stages - fewer)
    m_tiles = triton.cdiv(rows.num_rows, tile.pieces * ROWS)
    _launch(rows, weight, out, tile, m_tiles, per_range, groups=None, weights=None, limit=0.0)


def multiply_experts(rows, weight, out, grouped, *, weights=None, limit=0.0, tile=EXPERTS) -> None:
    """Like that of fp8_product_triton.py; `rows` has a row per sorted pair and four copies of its
    scales, `grouped` tiles of MOST_ROWS; the sides of `weight` are multiples of 128."""
    tile = tile._replace(end=PAIRS if weights is None else SWIGLU)
    _launch(
        rows, weight, out, tile, grouped.num_tiles, rows.num_steps, groups=grouped.groups,
        weights=weights, limit=limit,
    )  # fmt: skip
