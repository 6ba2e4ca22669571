# mypy: ignore-errors
"""Experts of a single token with a8 rows on sm_90 as streams of MXFP4 weights: the sums of
experts_a8_triton.py, in the same order (gemm/a8/fp8_stream_gluon.py).

Launches follow each other as in `experts_stream_gluon`: gate, the shared expert's w13, up, its w2,
down. What up and down read is from two launches back, so they start without waiting for the one
between; each quantises the row that it reads.
"""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.a8.fp8_prompt_gluon import sums_layout
from dsv4.ops.gemm.a8.fp8_stream_gluon import add_product, multiply, quantize_row, start_product
from dsv4.ops.gemm.a8.unpack_mxfp4_device import operand, unpack, viewed
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.variants.stream_gluon import (
    OUT,
    ROWS,
    TILE,
    begin_copy,
    commit_group,
    least_room,
    wait_group,
)
from dsv4.ops.gemm.variants.stream_gluon import barrier as wait_for_threads
from dsv4.ops.moe import router_triton
from dsv4.ops.moe.experts_stream_gluon import activate, activate_shared, stored

STAGES, WIDE = 4, 2  # of the ring; tiles that are copied together
TILE_BYTES = 64 * (16 + 1) * 4
COPY_WORDS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
COPY_SHIFTS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _tile_at(experts, words, shifts, part, place, steps, tiles):
    """The expert at `place`, written two launches earlier or more (a cache may hold stale values),
    and where its tile `part` is. A padding row, whose result is undefined, gets the first one."""
    expert = gl.maximum(gl.load(experts + place, cache_modifier=".cg"), 0)
    tile = (expert * tiles + part).to(gl.int64) * steps
    words = gl.multiple_of(words + tile * 1024, 64)
    return expert, words, gl.multiple_of(shifts + tile * 64, 64)


@gluon.jit
def _copy(words_room, shifts_room, words, shifts, turn, S: gl.constexpr, WIDE: gl.constexpr):
    """Copy WIDE tiles, words and shifts each contiguous, into their place in the ring."""
    at = gl.arange(0, WIDE * 1024, layout=COPY_WORDS)
    room = viewed(words_room, gl.int32, [S, WIDE * 1024], FLAT)
    begin_copy(room.index(turn % S), words + turn * (WIDE * 1024) + at)
    at = gl.arange(0, WIDE * 64, layout=COPY_SHIFTS)
    room = viewed(shifts_room, gl.int32, [S, WIDE * 64], FLAT)
    begin_copy(room.index(turn % S), shifts + turn * (WIDE * 64) + at)


@gluon.jit
def _begin(words, shifts, steps, S: gl.constexpr, PAD: gl.constexpr, WIDE: gl.constexpr):
    """A ring of S places for WIDE tiles each, with copies into all but one under way. PAD more
    tiles keep any multiprocessor from getting more programs than its share."""
    words_room = gl.allocate_shared_memory(gl.int32, [S * WIDE + PAD, 1024], FLAT)
    shifts_room = gl.allocate_shared_memory(gl.int32, [S * WIDE, 64], FLAT)
    for turn in gl.static_range(S - 1):
        if turn * WIDE < steps:
            _copy(words_room, shifts_room, words, shifts, turn, S, WIDE)
        commit_group()
    return words_room, shifts_room


@gluon.jit
def _product(words_room, shifts_room, place, codes, step):
    A: gl.constexpr = gl.DotOperandLayout(0, sums_layout(ROWS), 4)
    weights = operand(*unpack(words_room.index(place), shifts_room.index(place)))
    return start_product(gl.convert_layout(weights, A, assert_trivial=True), codes, step)


@gluon.jit
def _stream(
    words_room, shifts_room, words, shifts, codes, factors, steps, S: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """fp32 `[64, 8]`, whose first column is `steps` tiles times the row."""
    sums = gl.zeros([TILE, ROWS], gl.float32, sums_layout(ROWS))
    fence_async_shared()  # the row's codes
    for turn in range(0, steps // WIDE):
        wait_group(S - 2)
        wait_for_threads()
        if (turn + S - 1) * WIDE < steps:  # over the previous turn's tiles
            _copy(words_room, shifts_room, words, shifts, turn + S - 1, S, WIDE)
        commit_group()
        if WIDE == 2:
            product = _product(words_room, shifts_room, turn % S * 2, codes, turn * 2)
            later = _product(words_room, shifts_room, turn % S * 2 + 1, codes, turn * 2 + 1)
            sums = add_product(sums, product, factors, turn * 2, 1)
            sums = add_product(sums, later, factors, turn * 2 + 1, 0)
        else:
            product = _product(words_room, shifts_room, turn % S, codes, turn)
            sums = add_product(sums, product, factors, turn, 0)
    return sums


@gluon.jit
def a8_up_stream(
    x, z, experts, weights, words, shifts, factors, shared, chosen, inner, limit, steps, tiles,
    RANGES: gl.constexpr, S: gl.constexpr, PAD: gl.constexpr, WIDE: gl.constexpr,
    MOST: gl.constexpr,
):  # fmt: skip
    """32 activations of an expert. `shared`: sums of the shared expert's first matrix, RANGES of K;
    programs of the first expert activate these, too."""
    part = gl.program_id(0)
    place = gl.program_id(1)
    expert, words, shifts = _tile_at(experts, words, shifts, part, place, steps, tiles)
    words_room, shifts_room = _begin(words, shifts, steps, S, PAD, WIDE)
    factor = gl.load(factors + expert)
    weight = gl.load(weights + place, cache_modifier=".cg")
    codes, scales = quantize_row(x, 1.0, steps, MOST)
    gdc_wait()
    gdc_launch_dependents()
    if place == 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        activate_shared(
            shared, z + chosen * inner, z, 0, part, inner, limit, RANGES, True, LAYOUT
        )  # fmt: skip
    sums = _stream(words_room, shifts_room, words, shifts, codes, scales, steps, S, WIDE)
    both = stored(sums * factor, True).reshape([4, 2, 8, ROWS])
    gate, up = gl.split(gl.permute(both, [0, 2, 3, 1]))
    value = (activate(gate, up, limit).reshape([32, ROWS]) * weight).to(gl.bfloat16)
    L: gl.constexpr = value.type.layout
    column = gl.expand_dims(part * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, L)), 1)
    only = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, L)), 0)
    gl.store(z + place * inner + column + only, value, mask=(column < inner) & (only < 1))


@gluon.jit
def a8_down_stream(
    z, expert_sums, experts, words, shifts, factors, size, inner, steps, tiles,
    S: gl.constexpr, PAD: gl.constexpr, WIDE: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """64 channels of an expert's result."""
    part = gl.program_id(0)
    place = gl.program_id(1)
    expert, words, shifts = _tile_at(experts, words, shifts, part, place, steps, tiles)
    gdc_launch_dependents()
    words_room, shifts_room = _begin(words, shifts, steps, S, PAD, WIDE)
    factor = gl.load(factors + expert)
    codes, scales = quantize_row(z + place * inner, 1.0, steps, MOST)
    sums = _stream(words_room, shifts_room, words, shifts, codes, scales, steps, S, WIDE)
    sums = gl.convert_layout((sums * factor).to(gl.bfloat16), OUT)
    gdc_wait()
    column = gl.expand_dims(part * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT)), 1)
    only = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    gl.store(expert_sums + place * size + column + only, sums, mask=(column < size) & (only < 1))


def run(x, token_ids, gate, by):
    """bf16 `[places, 1, size]`, the shared expert's result last."""
    return launch(x, *router_triton.run(x, token_ids, gate), by)


def launch(x, chosen, weights, by):
    """What follows the router."""
    w13, w2, places = by.w13, by.w2, chosen.shape[1] + 1
    inner, size, device = w2.columns, w2.rows, x.device
    ranges, rows = split_k(by.shared_w13)[0], by.shared_w13.shape[0]
    shared = workspace(device, "shared_sums", ranges * rows, torch.float32)[: ranges * rows]
    multiply(x, [by.shared_w13], [shared.view(ranges, 1, rows)], partial=True)
    z = workspace(device, "experts_z", places * inner, torch.bfloat16)[: places * inner]
    sums = workspace(device, "a8_partial_sums", places * size, torch.bfloat16)
    sums = sums[: places * size].view(places, 1, size)
    grid = (w13.words.shape[1], places - 1)
    a8_up_stream[grid](
        x, z, chosen, weights, w13.words, w13.shifts, w13.factor, shared, places - 1, inner,
        by.limit, w13.num_steps, w13.words.shape[1], RANGES=ranges, **_ring(x, w13, grid),
    )  # fmt: skip
    multiply(z.view(places, inner)[-1:], [by.shared_w2], [sums[-1]])
    grid = (w2.words.shape[1], places - 1)
    a8_down_stream[grid](
        z, sums, chosen, w2.words, w2.shifts, w2.factor, size, inner, w2.num_steps,
        w2.words.shape[1], **_ring(x, w2, grid),
    )  # fmt: skip
    return sums


def _ring(x, weight, grid) -> dict[str, object]:
    """Constants and launch options."""
    wide = 1 if weight.num_steps % WIDE else WIDE
    stages = STAGES * WIDE // wide
    most = max(4, triton.next_power_of_2(weight.num_steps))
    used = 1024 + stages * wide * TILE_BYTES + most * (ROWS.value * 128 + 4)
    pad = max(0, least_room(x.device, math.prod(grid)) - used)
    return {
        "S": stages, "WIDE": wide, "PAD": triton.cdiv(pad, 4096), "MOST": most,
        "launch_pdl": True, "num_warps": 4,
    }  # fmt: skip
