# mypy: ignore-errors
"""Products of few rows on sm_90 that keep weights streaming: variant 0 of `dot_nvfp4`, in Gluon.

A program prefetches weights into a ring in shared memory before it waits for the previous launch:
weights depend on no launch. Products, operands and their order are the same as in `dot_nvfp4`.

Two rules keep early starts safe. Nothing is written before the wait. And only
`experts_stream_gluon` reads other launches' results before it, from two launches back: the launch
in between lets it start only after its own wait.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.ops.core.gpu import describe
from dsv4.ops.gemm.dot_device import scale_pairs, select_matrix, unpack_slot

commit_group, wait_group = async_copy.commit_group, async_copy.wait_group
if hasattr(async_copy, "async_load"):
    begin_copy, barrier = async_copy.async_load, gl.barrier
else:  # triton 3.6
    begin_copy, barrier = async_copy.async_copy_global_to_shared, gl.thread_barrier
unpack, pairs_of, select = (gluon.jit(f.fn) for f in (unpack_slot, scale_pairs, select_matrix))

SHARED_BYTES = 227 * 1024  # per multiprocessor
STAGES = 3  # pairs of tiles
NEWER = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # than triton 3.6
TILE = gl.constexpr(64)
ROWS = gl.constexpr(8)  # of input, at most
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
B = gl.constexpr(gl.DotOperandLayout(1, SUMS.value, 2))
SCALES = gl.constexpr(gl.SliceLayout(1, A.value))
COPY_WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
COPY_CODES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
OUT = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1]))
COPY_INPUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _copy_weights(
    words_room, codes_room, words, codes, turn, STAGES: gl.constexpr, WIDE: gl.constexpr
):
    """Copy WIDE tiles, words and codes each contiguous, into their place in the ring."""
    row = gl.arange(0, WIDE * 2 * TILE, layout=gl.SliceLayout(1, COPY_WORDS))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, COPY_WORDS))
    inside = gl.expand_dims(row * 16, 1) + gl.expand_dims(word, 0)
    begin_copy(words_room.index(turn % STAGES), words + turn * (WIDE * 2048) + inside)
    at = gl.arange(0, WIDE * TILE, layout=COPY_CODES)
    begin_copy(codes_room.index(turn % STAGES), codes + turn * (WIDE * TILE) + at)


@gluon.jit
def _copy_input(room, x, row_at, live, turn, STAGES: gl.constexpr, WIDE: gl.constexpr):
    """Missing rows stay as they are: their sums are never stored."""
    column = gl.arange(0, WIDE * 128, layout=gl.SliceLayout(0, COPY_INPUT))
    at = gl.expand_dims(row_at, 1) + gl.expand_dims(turn * (WIDE * 128) + column, 0)
    mask = gl.expand_dims(live, 1) & (gl.expand_dims(column, 0) >= 0)
    begin_copy(room.index(turn % STAGES), x + at, mask=mask)


@gluon.jit
def _multiply(
    acc, words_room, codes_room, input_room, first, PER_TURN: gl.constexpr, WIDE: gl.constexpr,
    MX: gl.constexpr,
):  # fmt: skip
    """Add the products of WIDE tiles, 16 columns at a time. `input_room`: one row, where the tiles
    begin at column `first`, or the tiles' columns of eight rows."""
    for tile in gl.static_range(WIDE):
        codes = codes_room.slice(tile * TILE, TILE).load(SCALES)
        if MX:  # each code by one shift and one mask
            even = (codes << 7) & 0x7F807F80
            odd = (codes >> 1) & 0x7F807F80
            pairs = (even, odd, even >> 16, odd >> 16)
        else:
            pairs = pairs_of(codes, True, False)
        for half in gl.static_range(2):
            words = words_room.slice((2 * tile + half) * TILE, TILE, dim=0).load(A)
            for slot in gl.static_range(4):
                both = pairs[half * 2 + slot // 2]
                scale = (both if slot % 2 == 0 or MX else both >> 16).to(gl.int16)
                scale = gl.expand_dims(scale.to(gl.bfloat16, bitcast=True), 1)
                weight = unpack(words, slot, True) * scale
                if PER_TURN:
                    own = input_room.slice((tile * 8 + half * 4 + slot) * 16, 16, dim=1)
                    part = own.permute((1, 0)).load(B)
                else:
                    own = input_room.index(first // 16 + tile * 8 + half * 4 + slot)
                    part = own.load(gl.SliceLayout(1, B))
                    zero = gl.zeros([1, ROWS], gl.bfloat16, B)
                    part, _ = gl.broadcast(gl.expand_dims(part, 1), zero)
                acc = mma_v2(weight, part, acc)
    return acc


@gluon.jit
def begin_stream(
    words, codes, steps, STAGES: gl.constexpr, PAD: gl.constexpr, WIDE: gl.constexpr,
    MX: gl.constexpr, FILL: gl.constexpr = 0,
):  # fmt: skip
    """A ring of STAGES places for WIDE tiles of weights each, with copies into all but one under
    way. PAD more places, and FILL more for scales, keep any multiprocessor from getting more
    programs than its share: a launch that starts early would crowd in where the previous one ends
    first."""
    words_room = gl.allocate_shared_memory(
        gl.int16, [STAGES + PAD, WIDE * 2 * TILE, 16], gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    )
    codes_room = gl.allocate_shared_memory(
        gl.int32 if MX else gl.int64, [STAGES + FILL, WIDE * TILE],
        gl.SwizzledSharedLayout(1, 1, 1, [0]),
    )  # fmt: skip
    for turn in gl.static_range(STAGES - 1):
        if turn * WIDE < steps:
            _copy_weights(words_room, codes_room, words, codes, turn, STAGES, WIDE)
        commit_group()
    return words_room, codes_room


@gluon.jit
def as_matrix(room):
    """Rows that are indexed one by one, as a whole."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if NEWER:
        return room.reinterpret(room.dtype, room.shape, PLAIN)
    else:
        return room._reinterpret(room.dtype, room.shape, PLAIN)


@gluon.jit
def load_row(x, columns, COLUMNS: gl.constexpr):
    """Load a row of `columns` (at most COLUMNS) into shared memory."""
    room = gl.allocate_shared_memory(
        gl.bfloat16, [COLUMNS // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    group = gl.expand_dims(gl.arange(0, COLUMNS // 16, layout=gl.SliceLayout(1, WHOLE)) * 16, 1)
    at = group + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, WHOLE)), 0)
    as_matrix(room).store(gl.load(x + at, mask=at < columns, other=0.0, cache_modifier=".cg"))
    return room


@gluon.jit
def stream_row(
    words_room, codes_room, row_room, words, codes, first, last, steps,
    STAGES: gl.constexpr, WIDE: gl.constexpr, MX: gl.constexpr,
):  # fmt: skip
    """fp32 `[64, 8]`, all columns equal: the tiles `first` to `last` of `steps` times a row."""
    acc = gl.zeros([TILE, ROWS], gl.float32, SUMS)
    for turn in range(first // WIDE, last // WIDE):
        wait_group(STAGES - 2)
        barrier()
        if (turn + STAGES - 1) * WIDE < steps:  # over the previous turn's tiles
            _copy_weights(words_room, codes_room, words, codes, turn + STAGES - 1, STAGES, WIDE)
        commit_group()
        place = turn % STAGES
        acc = _multiply(
            acc, words_room.index(place), codes_room.index(place), row_room, turn * (WIDE * 128),
            False, WIDE, MX,
        )  # fmt: skip
    return acc


@gluon.jit
def _stream_rows(
    words_room, codes_room, words, codes, x, x_stride, num_rows, steps,
    STAGES: gl.constexpr, WIDE: gl.constexpr, MX: gl.constexpr,
):  # fmt: skip
    """fp32 `[64, 8]`: all `steps` tiles times up to eight rows."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY_INPUT))
    row_at, live = row * x_stride, row < num_rows
    input_room = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, ROWS, WIDE * 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    for turn in gl.static_range(STAGES - 1):
        if turn * WIDE < steps:
            _copy_input(input_room, x, row_at, live, turn, STAGES, WIDE)
        commit_group()
    acc = gl.zeros([TILE, ROWS], gl.float32, SUMS)
    for turn in range(0, steps // WIDE):
        wait_group(STAGES - 2)
        barrier()
        following = turn + STAGES - 1
        if following * WIDE < steps:
            _copy_weights(words_room, codes_room, words, codes, following, STAGES, WIDE)
            _copy_input(input_room, x, row_at, live, following, STAGES, WIDE)
        commit_group()
        place = turn % STAGES
        acc = _multiply(
            acc, words_room.index(place), codes_room.index(place), input_room.index(place), 0,
            True, WIDE, MX,
        )  # fmt: skip
    return acc


@gluon.jit
def add_ranges(total, num_rows, partials, counters, pid, split, count):
    """Like `finish_ranges`: store this range's sums; the last program of a tile gets their total
    and True."""
    rm = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    live = gl.expand_dims(rm < num_rows, 0)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
    inside = gl.expand_dims(row, 1) + gl.expand_dims(rm * TILE, 0)
    base = partials + (pid - split).to(gl.int64) * (TILE * ROWS)
    gl.store(base + split * (TILE * ROWS) + inside, total, mask=live & (inside >= 0))
    barrier()
    arrived = gl.atomic_add(counters + (pid - split), 1, sem="acq_rel")
    is_last = arrived == count - 1
    total = gl.zeros([TILE, ROWS], gl.float32, OUT)
    if is_last:
        for first_of in range(0, count, 8):
            for index in gl.static_range(8):
                present = live & (first_of + index < count) & (inside >= 0)
                ptrs = base + (first_of + index) * (TILE * ROWS) + inside
                total += gl.load(ptrs, mask=present, other=0.0, cache_modifier=".cg")
        gl.store(counters + (pid - split), 0)
    return total, is_last


@gluon.jit
def store_sums(
    total, outs, firsts, pid, tile, first_row, num_rows, size, is_last, NUM: gl.constexpr,
    F32: gl.constexpr,
):  # fmt: skip
    """Store `[64, 8]` sums of weight tile `tile`, from output row `first_row` on; `F32`: see
    `is_wide`."""
    rn = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
    rm = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    out = select(outs, firsts, pid, NUM)
    out_f32 = gl.multiple_of(out.to(gl.pointer_type(gl.float32)), 16)
    out_bf16 = gl.multiple_of(out.to(gl.pointer_type(gl.bfloat16)), 16)
    out_rows = rm.to(gl.int64) + first_row
    offsets = gl.expand_dims(out_rows, 0) * size + gl.expand_dims(rn, 1)
    live = gl.expand_dims(rm < num_rows, 0)
    mask = gl.expand_dims(rn < gl.where(is_last, size, 0), 1) & live
    if F32 == 0:
        gl.store(out_bf16 + offsets, total.to(gl.bfloat16), mask=mask)
    elif F32 == 2**NUM - 1:
        gl.store(out_f32 + offsets, total, mask=mask)
    else:
        wide = gl.where(pid >= 0, F32 % 2, 0)
        for i in gl.static_range(1, NUM):
            wide = gl.where(pid >= firsts[i], (F32 >> i) % 2, wide)
        if wide == 1:
            gl.store(out_f32 + offsets, total, mask=mask)
        else:
            gl.store(out_bf16 + offsets, total.to(gl.bfloat16), mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "first_range"])
def linear_stream(
    x, x_stride, num_rows, num_columns, group_rows, total_steps,
    words, scales, globals_, outs, sizes, parts, firsts, ranges, range_steps, first_range,
    partials, counters,
    NUM: gl.constexpr, F32: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
    SPLIT: gl.constexpr, COLUMNS: gl.constexpr, PAD: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """`_linear_kernel` of `linear_triton` for NVFP4, up to eight rows and split-K."""
    pid = gl.program_id(0)
    size = select(sizes, firsts, pid, NUM)
    count = select(ranges, firsts, pid, NUM)
    per_range = select(range_steps, firsts, pid, NUM)
    tile = pid - select(firsts, firsts, pid, NUM)
    split = tile % count
    tile = tile // count
    first = (split + first_range) * per_range
    steps = gl.minimum(per_range, total_steps - first)
    at = tile.to(gl.int64) * total_steps + first
    w = select(words, firsts, pid, NUM).to(gl.pointer_type(gl.int16)) + at * 2048
    s = select(scales, firsts, pid, NUM).to(gl.pointer_type(gl.int64)) + at * TILE
    group = tile * TILE // group_rows
    x += group * num_columns + split * per_range * 128
    rn = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
    factors = select(globals_, firsts, pid, NUM).to(gl.pointer_type(gl.float32))
    part_rows = select(parts, firsts, pid, NUM)
    factor = gl.load(factors + rn // part_rows, mask=rn < size, other=0.0) * 128.0
    w = gl.multiple_of(w, 64)
    s = gl.multiple_of(s, 64)
    gdc_launch_dependents()
    words_room, codes_room = begin_stream(w, s, steps, STAGES, PAD, WIDE, False)
    gdc_wait()
    if COLUMNS > 0:
        row = load_row(x, steps * 128, COLUMNS)
        total = stream_row(words_room, codes_room, row, w, s, 0, steps, steps, STAGES, WIDE, False)
    else:
        total = _stream_rows(
            words_room, codes_room, w, s, x, x_stride, num_rows, steps, STAGES, WIDE, False
        )
    total = gl.convert_layout(total, OUT)
    is_last = count > 0
    if SPLIT:  # noqa: SIM102 - a branch that never runs does not compile
        if count > 1:
            total, is_last = add_ranges(total, num_rows, partials, counters, pid, split, count)
    first_row = split * 0
    if PARTIAL:
        total = total * 128.0
        first_row = split * num_rows
    else:
        total = total * gl.expand_dims(factor, 1)
    store_sums(total, outs, firsts, pid, tile, first_row, num_rows, size, is_last, NUM, F32)


def least_room(device, programs) -> int:
    """Bytes of shared memory with which no multiprocessor holds more programs than its share."""
    share = -(-programs // describe(device).multiprocessors)
    return SHARED_BYTES // (share + 1) + 256


def ring_options(device, programs, stages, lengths, columns) -> dict[str, object]:
    """Constants and launch options for a kernel with a ring of about `stages` pairs of tiles.
    `lengths`: steps per program; `columns`: of the row that a program keeps, 0 if several rows."""
    wide = 1 if any(length % 2 for length in lengths) else 2
    stages = stages if wide == 2 else 2 * stages - 1
    share = -(-programs // describe(device).multiprocessors)
    used = 1024 + stages * wide * (4608 if columns else 4608 + 2048) + 2 * columns
    pad = max(0, SHARED_BYTES // share - used) // (wide * 4096)
    return {"STAGES": stages, "PAD": pad, "WIDE": wide, "launch_pdl": True, "num_warps": 4}


def launch(grid, arguments, splits, tile, **constants) -> None:
    """`splits`: ranges of K and steps in each, by matrix; `tile`: a `LinearTile`."""
    x, _, num_rows, columns = arguments[:4]
    longest = max(steps for _, steps in splits) * 128 if num_rows == 1 else 0
    lengths = [n for c, n in splits for n in (n, triton.cdiv(columns, 128) - (c - 1) * n)]
    linear_stream[grid](
        *arguments, COLUMNS=triton.next_power_of_2(longest) if longest else 0, **constants,
        **ring_options(x.device, grid[0], STAGES, lengths, longest),
    )  # fmt: skip
