# mypy: ignore-errors
"""One row times matrices that kernels read as stored, bf16 or FP8 with power-of-two scales, on
sm_90: `_linear_kernel` of `linear_triton` as a stream of weights (`stream_gluon.py`), with the same
sums in the same order.

A turn takes 64 rows by 128 columns. FP8: columns are permuted within each 16, which changes no bit
of a product: a thread then multiplies the four adjacent columns that it loads. Codes of NaN, which
no weight has, count as 480.

The next launch may start only after this one's wait: a launch may rely on it to read results from
two launches back.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.ops.core.gpu import describe
from dsv4.ops.gemm.dot_device import power_of
from dsv4.ops.gemm.variants.stream_gluon import (
    OUT,
    ROWS,
    SHARED_BYTES,
    SUMS,
    TILE,
    A,
    B,
    add_ranges,
    as_matrix,
    barrier,
    begin_copy,
    commit_group,
    load_row,
    select,
    store_sums,
    wait_group,
)

power = gluon.jit(power_of.fn)
FP8_KIND = 2  # of `LinearTile`

# four adjacent columns of two rows per thread, and what becomes of them if columns are permuted
FOURS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
FOUR_INPUTS = gl.constexpr(
    gl.DistributedLinearLayout([[1], [2]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [16])
)
# the bits of four E4M3 where bf16 has them, then times 2^120
_E4M3 = gl.constexpr(
    "{ .reg .b32 t, u, p; mov.b32 p, 0x7B807B80; "  # 2^120
    "prmt.b32 t, $2, 0, 0x1404; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; "
    "lop3.b32 t, t, 0x80008000, u, 0xEA; mul.rn.bf16x2 $0, t, p; "
    "prmt.b32 t, $2, 0, 0x3424; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; "
    "lop3.b32 t, t, 0x80008000, u, 0xEA; mul.rn.bf16x2 $1, t, p; }"
)


@gluon.jit
def _from_e4m3(codes):
    """uint8 codes as bf16, exactly."""
    return gl.inline_asm_elementwise(
        _E4M3, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def _copy_turn(room, weight, row_at, turn, STAGES: gl.constexpr, COPY: gl.constexpr):
    """Copy 128 columns of 64 rows into their place in the ring."""
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(row_at, 1) + gl.expand_dims(turn * 128 + column, 0)
    begin_copy(room.index(turn % STAGES), weight + at)


@gluon.jit
def _multiply(sums, weights, row_room, first, factor, FP8: gl.constexpr):
    """Add the products of a turn, 16 columns at a time; in the row they begin at `first`."""
    for group in gl.static_range(8):
        own = weights.slice(group * 16, 16, dim=1)
        inputs = row_room.index(first // 16 + group)
        if FP8:
            weight = _from_e4m3(own.load(FOURS)).reshape([TILE, 4, 2, 2]).permute((0, 2, 1, 3))
            weight = gl.convert_layout(weight.reshape([TILE, 16]), A)
            weight = weight * factor
            part = inputs.load(FOUR_INPUTS).reshape([4, 2, 2]).permute((1, 0, 2)).reshape([16])
            part = gl.convert_layout(part, gl.SliceLayout(1, B))
        else:
            weight = own.load(A)
            part = inputs.load(gl.SliceLayout(1, B))
        part, _ = gl.broadcast(gl.expand_dims(part, 1), gl.zeros([1, ROWS], gl.bfloat16, B))
        sums = mma_v2(weight, part, sums)
    return sums


@gluon.jit
def _load_factors(scales, steps, MOST: gl.constexpr):
    """The scales of a range's steps, as bf16 in shared memory, each 16 times."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    room = gl.allocate_shared_memory(gl.bfloat16, [MOST, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    step = gl.expand_dims(gl.arange(0, MOST, layout=gl.SliceLayout(1, LAYOUT)), 1)
    at = step + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT)) * 0, 0)
    as_matrix(room).store(power(gl.load(scales + at, mask=at < steps, other=0)))
    return room


@gluon.jit(do_not_specialize=["num_rows", "first_range"])
def stored_stream(
    x, x_stride, num_rows, num_columns, group_rows, total_steps,
    words, scales, globals_, outs, sizes, parts, firsts, ranges, range_steps, first_range,
    partials, counters,
    NUM: gl.constexpr, F32: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
    SPLIT: gl.constexpr, COLUMNS: gl.constexpr, PAD: gl.constexpr, FP8: gl.constexpr,
    TILE_ROWS: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """TILE_ROWS: weight rows under one FP8 scale; MOST: steps of a range, rounded up."""
    pid = gl.program_id(0)
    size = select(sizes, firsts, pid, NUM)
    count = select(ranges, firsts, pid, NUM)
    per_range = select(range_steps, firsts, pid, NUM)
    tile = pid - select(firsts, firsts, pid, NUM)
    split = tile % count
    tile = tile // count
    first = (split + first_range) * per_range
    steps = gl.minimum(per_range, total_steps - first)
    x += tile * TILE // group_rows * num_columns + split * per_range * 128
    DTYPE: gl.constexpr = gl.uint8 if FP8 else gl.bfloat16
    WIDTH: gl.constexpr = 16 if FP8 else 8  # of a copy
    COPY: gl.constexpr = gl.BlockedLayout([1, WIDTH], [WIDTH // 4, 128 // WIDTH], [4, 1], [1, 0])
    w = gl.multiple_of(select(words, firsts, pid, NUM).to(gl.pointer_type(DTYPE)), 16)
    row = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY))
    row_at = row.to(gl.int64) * num_columns + first * 128
    room = gl.allocate_shared_memory(
        DTYPE, [STAGES + PAD, TILE, 128], gl.SwizzledSharedLayout(WIDTH, 1, 8, [1, 0])
    )
    for turn in gl.static_range(STAGES - 1):
        if turn < steps:
            _copy_turn(room, w, row_at, turn, STAGES, COPY)
        commit_group()
    if FP8:
        s = select(scales, firsts, pid, NUM).to(gl.pointer_type(gl.uint8))
        factors = _load_factors(s + tile * TILE // TILE_ROWS * total_steps + first, steps, MOST)
    gdc_wait()
    gdc_launch_dependents()
    row_room = load_row(x, steps * 128, COLUMNS)
    total = gl.zeros([TILE, ROWS], gl.float32, SUMS)
    for turn in range(0, steps):
        wait_group(STAGES - 2)
        barrier()
        if turn + STAGES - 1 < steps:  # over the previous turn's weights
            _copy_turn(room, w, row_at, turn + STAGES - 1, STAGES, COPY)
        commit_group()
        weights = room.index(turn % STAGES)
        factor = 0.0
        if FP8:
            factor = gl.expand_dims(factors.index(turn).load(gl.SliceLayout(0, A)), 0)
        total = _multiply(total, weights, row_room, turn * 128, factor, FP8)
    total = gl.convert_layout(total, OUT)
    is_last = count > 0
    if SPLIT:  # noqa: SIM102 - a branch that never runs does not compile
        if count > 1:
            total, is_last = add_ranges(total, num_rows, partials, counters, pid, split, count)
    first_row = split * 0
    if PARTIAL:
        first_row = split * num_rows
    store_sums(total, outs, firsts, pid, tile, first_row, num_rows, size, is_last, NUM, F32)


def launch(grid, arguments, splits, tile, **constants) -> None:
    """`splits`: ranges of K and steps in each, by matrix; `tile`: a `LinearTile`."""
    device, fp8 = arguments[0].device, tile.kind == FP8_KIND
    most = triton.next_power_of_2(max(steps for _, steps in splits))
    stages, turn = (4, 8192) if fp8 else (3, 16384)  # of the ring; bytes
    share = -(-grid[0] // describe(device).multiprocessors)
    used = 3072 + stages * turn + most * (256 + 32)
    stored_stream[grid](
        *arguments, STAGES=stages, PAD=max(0, SHARED_BYTES // share - used) // turn,
        COLUMNS=128 * most, MOST=most, FP8=fp8, TILE_ROWS=tile.tile_rows, **constants,
        launch_pdl=True, num_warps=4,
    )  # fmt: skip
