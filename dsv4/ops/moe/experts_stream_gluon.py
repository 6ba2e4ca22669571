# mypy: ignore-errors
"""Experts of a single token on sm_90 as streams of weights (gemm/variants/stream_gluon.py): the
sums of `experts_single_token_triton`, in the same order.

A token's experts are known only once the gate is complete: the up-projection waits for it; the
down-projection, one launch later, does not.

A shared expert in FP8 (official checkpoints) has two launches of its own, between these: gate, its
w13, up, its w2, down. Then neither projection waits: what it reads is from two launches back.
"""

import math

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.ops.core.helpers_device import swiglu, through_bf16
from dsv4.ops.gemm.variants.stream_gluon import (
    OUT,
    SUMS,
    TILE,
    begin_stream,
    least_room,
    load_row,
    ring_options,
    stream_row,
)
from dsv4.ops.moe.expert_tensors import expert_weights, is_mx, num_expert_ranges, partial_sums

activate, stored = gluon.jit(swiglu.fn), gluon.jit(through_bf16.fn)
HALF = gl.constexpr(32)
UP_STAGES, DOWN_STAGES = 5, 3  # pairs of tiles in a ring


@gluon.jit
def _tile_at(words, scales, tile, steps, MX: gl.constexpr):
    """Addresses of the words and codes of a row tile."""
    words += tile.to(gl.int64) * steps * 2048
    scales += tile.to(gl.int64) * steps * (128 if MX else 256)
    codes = scales.to(gl.pointer_type(gl.int32 if MX else gl.int64), bitcast=True)
    return gl.multiple_of(words, 64), gl.multiple_of(codes, 64)


@gluon.jit
def activate_shared(
    sums, z, rest, num_rest, part, inner, limit, RANGES: gl.constexpr, ROUNDED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """32 activations of the shared expert, from RANGES partial sums of its gate and up rows. Its
    result will be a single sum: the `rest` of its ranges is zero. ROUNDED: for a8."""
    for first in range(part * HALF, num_rest, gl.num_programs(0) * HALF):
        at = first + gl.arange(0, HALF, layout=LAYOUT)
        gl.store(rest + at, gl.zeros([HALF], gl.float32, LAYOUT), mask=at < num_rest)
    column = part * HALF + gl.arange(0, HALF, layout=LAYOUT)
    live = column < inner
    gate = gl.zeros([HALF], gl.float32, LAYOUT)
    up = gl.zeros([HALF], gl.float32, LAYOUT)
    for index in gl.static_range(RANGES):
        at = sums + index * 2 * inner + column
        gate += gl.load(at, mask=live, other=0.0, cache_modifier=".cg")
        up += gl.load(at + inner, mask=live, other=0.0, cache_modifier=".cg")
    if ROUNDED:
        gate, up = stored(gate, True), stored(up, True)
    result = activate(gate, up, limit)
    gl.store(z + column, result.to(gl.bfloat16), mask=live)


@gluon.jit
def up_stream(
    x, z, experts, weights, words, scales, factors, places, counts, shared, rest, num_rest,
    chosen, inner, limit, total_steps, expert_tiles,
    PARTS: gl.constexpr, RANGES: gl.constexpr, STAGES: gl.constexpr, PAD: gl.constexpr,
    WIDE: gl.constexpr, COLUMNS: gl.constexpr, MX: gl.constexpr, PLACED: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """32 activations of an expert, from 32 gate rows and 32 up rows of a tile. `places` and
    `counts`: from an expert table (PLACED). SHARED: ranges of K of an FP8 shared expert, whose
    sums `shared` are from the previous launch; the gate was the one before."""
    part = gl.program_id(0)
    place = gl.program_id(1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if SHARED == 0:
        row = load_row(x, total_steps * 128, COLUMNS)  # written two launches earlier
        gdc_wait()
        gdc_launch_dependents()
        expert = gl.load(experts + place)
        found = expert
    else:
        found = gl.load(experts + place, cache_modifier=".cg")
        expert = gl.maximum(found, 0)  # all programs run: some also serve the shared expert
    if expert >= 0:  # otherwise on another rank
        tile = expert * expert_tiles + part
        if PLACED:
            tile = expert * 0 + part
            at = gl.load(places + expert)
            words += at
            scales += at
        words, codes = _tile_at(words, scales, tile, total_steps, MX)
        words_room, codes_room = begin_stream(words, codes, total_steps, STAGES, PAD, WIDE, MX)
        gate_factor = gl.load(factors + expert * PARTS) * 128.0
        up_factor = gl.load(factors + expert * PARTS + PARTS - 1) * 128.0
        if SHARED == 0:
            weight = gl.load(weights + place)
        else:
            weight = gl.load(weights + place, cache_modifier=".cg")
            row = load_row(x, total_steps * 128, COLUMNS)
            gdc_wait()
            gdc_launch_dependents()
            if place == 0:
                activate_shared(
                    shared, z + chosen * inner, rest, num_rest, part, inner, limit, SHARED, False,
                    LAYOUT,
                )  # fmt: skip
        if PLACED:  # noqa: SIM102 - a constant, then a value
            if part == 0:
                gl.atomic_add(counts + expert, gl.where(found >= 0, 1, 0), sem="relaxed")
        total = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, SUMS))
        per_range = gl.cdiv(total_steps, RANGES)
        for index in gl.static_range(RANGES):
            acc = stream_row(
                words_room, codes_room, row, words, codes, index * per_range,
                gl.minimum((index + 1) * per_range, total_steps), total_steps, STAGES, WIDE, MX,
            )  # fmt: skip
            total = total + gl.max(acc, 1)  # all columns are equal
        room = gl.allocate_shared_memory(gl.float32, [TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        room.store(total)
        gate = room.slice(0, HALF).load(LAYOUT)
        up = room.slice(HALF, HALF).load(LAYOUT)
        result = activate(gate * gate_factor, up * up_factor, limit) * weight
        column = part * HALF + gl.arange(0, HALF, layout=LAYOUT)
        live = column < inner
        if SHARED > 0:
            live = live & (found >= 0)
        gl.store(z + place * inner + column, result.to(gl.bfloat16), mask=live)


@gluon.jit
def down_stream(
    z, partial_sums, experts, words, scales, factors, shared_words: gl.int64,
    shared_scales: gl.int64, shared_factors: gl.int64, places, chosen, size, inner, total_steps,
    expert_tiles, RANGES: gl.constexpr, STAGES: gl.constexpr, PAD: gl.constexpr,
    WIDE: gl.constexpr, COLUMNS: gl.constexpr, MX: gl.constexpr, PLACED: gl.constexpr,
    EARLY: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """Stores split-K partial sums; the consumer reduces them. EARLY: the activations are from two
    launches back."""
    part = gl.program_id(0)
    place = gl.program_id(1)
    split = gl.program_id(2)
    routed = place < chosen
    # written two launches earlier; bypasses the cache, which may hold stale values
    expert = gl.load(experts + place, mask=routed, other=0, cache_modifier=".cg")
    if expert >= 0:
        factor = gl.load(factors + gl.where(routed, expert, shared_factors)) * 128.0
        words += gl.where(routed, 0, shared_words)
        scales += gl.where(routed, 0, shared_scales)
        tile = expert * expert_tiles + part
        if PLACED:
            tile = expert * 0 + part
            at = gl.load(places + expert, mask=routed, other=0)
            words += at
            scales += at
        words, codes = _tile_at(words, scales, tile, total_steps, MX)
        per_range = gl.cdiv(total_steps, RANGES)
        first = split * per_range
        steps = gl.minimum(per_range, total_steps - first)
        words += first * 2048
        codes += first * TILE
        gdc_launch_dependents()
        words_room, codes_room = begin_stream(words, codes, steps, STAGES, PAD, WIDE, MX, FILL)
        if not EARLY:
            gdc_wait()
        row = load_row(z + place * inner + first * 128, steps * 128, COLUMNS)
        acc = stream_row(
            words_room, codes_room, row, words, codes, 0, steps, steps, STAGES, WIDE, MX
        )
        if EARLY:
            gdc_wait()
        sums = gl.convert_layout(acc, OUT)
        column = gl.expand_dims(part * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT)), 1)
        only = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, OUT)), 0)
        out = partial_sums + (place * RANGES + split) * size
        gl.store(out + column + only, sums * factor, mask=(column < size) & (only < 1))


def run(x, z, experts, weights, w13, w2, shared_w2, limit, table=(None, None)):
    """fp32 `[places, ranges, size]` for one row. Its gate was the previous launch; `z` already
    holds the shared expert's activations. `table`: see `table_of`."""
    up(x, z, experts, weights, w13, w2, limit, table)
    expert_sums = partial_sums(z, experts.shape[1] + (shared_w2 is not None), w2)
    down(z, expert_sums, experts, w2, shared_w2, table)
    return expert_sums


def up(x, z, experts, weights, w13, w2, limit, table, shared=None, rest=None) -> None:
    """`shared`: partial sums `[ranges, 2 inner]` of an FP8 shared expert; `rest`: what its result
    leaves of its ranges."""
    chosen, ranges, size = experts.shape[1], num_expert_ranges(w13), w13.num_steps
    grid = (triton.cdiv(w13.rows, 64), chosen)
    columns = triton.next_power_of_2(w13.columns)
    lengths = (triton.cdiv(size, ranges), size)
    up_stream[grid](
        x, z, experts, weights, *expert_weights(w13, None)[0], *table, shared, rest,
        0 if rest is None else rest.numel(), chosen, w2.columns, limit, size,
        w13.packed.shape[1], PARTS=w13.global_scale.shape[1], RANGES=ranges, COLUMNS=columns,
        MX=is_mx(w13), PLACED=table[0] is not None, SHARED=0 if shared is None else len(shared),
        **ring_options(x.device, math.prod(grid), UP_STAGES, lengths, columns),
    )  # fmt: skip


def down(z, expert_sums, experts, w2, shared_w2, table, *, early=False) -> None:
    """`early`: a launch ran since the up-projection. Only routed experts or also the shared one."""
    ranges, size = expert_sums.shape[1], w2.num_steps
    grid = (triton.cdiv(w2.rows, 64), experts.shape[1] + (shared_w2 is not None), ranges)
    lengths = (triton.cdiv(size, ranges), size)
    columns = triton.next_power_of_2(lengths[0] * 128)
    own, *offsets = expert_weights(w2, shared_w2)
    options = ring_options(z.device, math.prod(grid), DOWN_STAGES, lengths, columns)
    wide, codes = options["WIDE"], 256 if is_mx(w2) else 512
    used = 1024 + 2 * columns
    used += wide * (options["STAGES"] * (4096 + codes) + options["PAD"] * 4096)
    fill = max(0, least_room(z.device, math.prod(grid)) - used)
    down_stream[grid](
        z, expert_sums, experts, *own, *offsets, table[0], experts.shape[1], w2.rows, w2.columns,
        size, w2.packed.shape[1], RANGES=ranges, COLUMNS=columns, MX=is_mx(w2),
        PLACED=table[0] is not None, EARLY=early, FILL=triton.cdiv(fill, wide * codes), **options,
    )  # fmt: skip
