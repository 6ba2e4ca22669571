# mypy: ignore-errors
"""Experts of a single token on a GPU: no sorting; each of its experts is a product with one row.

A long K is split into two ranges. In the up-projection one program runs both, each in its own warp,
and adds them; separate programs would wait for each other. Top-k leaves memory bandwidth unused, so
the shared expert's up-projection overlaps it in the same launch.
"""

from importlib import import_module
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.formats.quantized import Fp8BlockTensor
from dsv4.ops.core.helpers_device import depend, swiglu
from dsv4.ops.core.launch import dependent_options, interpreting, streams
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.dot_device import dot_nvfp4, dot_two_ranges
from dsv4.ops.gemm.split_k import num_ranges, split_k
from dsv4.ops.moe import router_triton
from dsv4.ops.moe.expert_tensors import expert_weights, is_mx, num_expert_ranges, partial_sums
from dsv4.ops.moe.placed import stack_of, table_of
from dsv4.ops.moe.router_triton import gate_program, prepare

STAGES = 3
UP_ROWS, GATE_ROWS = 32, 32  # per program with two warps


class UpTile(NamedTuple):
    """Constants of an up-projection: a program's weight rows, and how it multiplies."""

    ranges: int  # of K
    bn: int  # 64 with one range
    stages: int
    even: bool  # ranges have equal length; otherwise the second may be shorter
    asm: bool
    mx: bool


@triton.jit
def _store(row, columns, size, values):
    """Store the first of eight columns of `values`."""
    first = tl.arange(0, 8)[None, :]
    tl.store(row + columns[:, None] + first, values, mask=(columns < size)[:, None] & (first < 1))


@triton.jit
def _up_program(
    part, place, expert, weight, num_factors, x, z, words, scales, factors, size, inner, limit,
    total_steps, expert_tiles, U: tl.constexpr,
):  # fmt: skip
    """bn/2 activations, from bn/2 gate rows and bn/2 up rows of a tile."""
    BN: tl.constexpr = U.bn
    gate_factor = tl.load(factors + expert * num_factors) * 128.0
    up_factor = tl.load(factors + expert * num_factors + num_factors - 1) * 128.0
    HALF: tl.constexpr = BN // 2
    tile = expert * expert_tiles + part // (64 // BN)
    index = tl.arange(0, BN)
    rows = index // HALF * 32 + part % (64 // BN) * HALF + index % HALF
    words = tl.multiple_of(words + tile * total_steps * 2048, 64)
    scales = tl.multiple_of(scales + tile * total_steps * (128 if U.mx else 256), 64)
    only = tl.arange(0, 8)
    if U.ranges == 1:
        acc = 0.0 + dot_nvfp4(
            words, scales, x, (only * 0,), (only < 1,), 0, total_steps, total_steps, size, BN,
            U.stages, 0, U.even, U.asm, U.mx,
        )[0]  # fmt: skip
    else:
        earlier, later = dot_two_ranges(
            words, scales, rows, x, only * 0, only < 1, total_steps, size, U.stages, U.even,
            U.asm, U.mx,
        )  # fmt: skip
        acc = 0.0 + earlier + later
    gate, up = tl.split(acc.reshape(2, HALF, 8).permute(1, 2, 0))
    result = swiglu(gate * gate_factor, up * up_factor, limit) * weight
    column = part * HALF + tl.arange(0, HALF)
    _store(z + place * inner, column, inner, result.to(tl.bfloat16))


@triton.jit
def _up_kernel(
    x, z, experts, weights, w, shared_words: tl.int64, shared_scales: tl.int64,
    shared_factors: tl.int64, places, counts, chosen, size, inner, limit, total_steps,
    expert_tiles, PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, PLACED: tl.constexpr,
    U: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`shared_*`: offsets of the shared expert's weights; its place is the last. `places` and
    `counts`: from an expert table (PLACED)."""
    place = tl.program_id(1)
    routed = place < chosen
    depend(DEPENDENT)
    expert = tl.load(experts + place, mask=routed, other=0)
    if expert < 0:  # on another rank
        return
    weight = tl.load(weights + place, mask=routed, other=1.0)
    words = w.words + tl.where(routed, 0, shared_words)
    scales = w.scales + tl.where(routed, 0, shared_scales)
    factors = w.factors + tl.where(routed, 0, shared_factors)
    if PLACED:
        at = tl.load(places + expert, mask=routed, other=0)
        words += at
        scales += at
        tl.atomic_add(counts + expert, 1, mask=routed & (tl.program_id(0) == 0))
    _up_program(
        tl.program_id(0), place, expert, weight, tl.where(routed, PARTS, SHARED_PARTS),
        x, z, words, scales, factors, size, inner, limit, total_steps,
        0 if PLACED else expert_tiles, U,
    )  # fmt: skip


@triton.jit
def _gate_kernel(
    x, gate, counters, g, size, num_experts, per_range, gate_tiles, scaling, z, w, inner, limit,
    total_steps, GATE_ROWS: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr,
    G: tl.constexpr, U: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The gate (its last program selects experts) and the shared expert's up-projection."""
    pid = tl.program_id(0)
    programs = gate_tiles * G.ranges
    depend(DEPENDENT)
    if pid < programs:
        gate_program(
            pid // G.ranges, pid % G.ranges, 0, programs, x, 0, gate, counters, g, 1, size,
            num_experts, total_steps, per_range, scaling, 8, GATE_ROWS, True, EVEN_K, G,
        )  # fmt: skip
    else:
        _up_program(
            pid - programs, G.chosen, tl.zeros((), tl.int64), 1.0, PARTS, x, z, w.words, w.scales,
            w.factors, size, inner, limit, total_steps, 0, U,
        )  # fmt: skip


@triton.jit
def _down_kernel(
    z, partial_sums, experts, w, shared_words: tl.int64, shared_scales: tl.int64,
    shared_factors: tl.int64, places, chosen, size, inner, total_steps, expert_tiles,
    RANGES: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
    MX: tl.constexpr, PLACED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Stores split-K partial sums; the consumer reduces them."""
    part = tl.program_id(0)
    place = tl.program_id(1)
    split = tl.program_id(2)
    routed = place < chosen
    depend(DEPENDENT)
    expert = tl.load(experts + place, mask=routed, other=0)
    if expert < 0:
        return
    factor = tl.load(w.factors + tl.where(routed, expert, shared_factors)) * 128.0
    tile = part if PLACED else expert * expert_tiles + part
    words, scales = w.words, w.scales
    if PLACED:
        at = tl.load(places + expert, mask=routed, other=0)
        words += at
        scales += at
    words += tl.where(routed, 0, shared_words) + tile * total_steps * 2048
    scales += tl.where(routed, 0, shared_scales) + tile * total_steps * (128 if MX else 256)
    only = tl.arange(0, 8)
    per_range = tl.cdiv(total_steps, RANGES)
    acc = dot_nvfp4(
        tl.multiple_of(words, 64), tl.multiple_of(scales, 64), z + place * inner, (only * 0,),
        (only < 1,), split * per_range, tl.minimum((split + 1) * per_range, total_steps),
        total_steps, inner, 64, STAGES, 0, EVEN_K, ASM, MX,
    )[0]  # fmt: skip
    column = part * 64 + tl.arange(0, 64)
    _store(partial_sums + (place * RANGES + split) * size, column, size, acc * factor)


def launch(x, experts, weights, by, gather=None):
    """fp32 `[places, ranges, size]`: partial sums per expert and range, the shared expert
    (its matrices may be None) last. `gather`: see `split_experts`."""
    z, own = _between(x, experts.shape[1], stack_of(by.w2)), stack_of(by.w13).rows // 2
    _up(x, z, experts, weights, by, by.shared_w13)
    if gather is not None:
        z = gather(z[: experts.shape[1] * own].view(-1, own))
    return _down(z, experts, by)


def _up(x, z, experts, weights, by, shared) -> None:
    places, counts = table_of(by.w13)
    w13, chosen = stack_of(by.w13), experts.shape[1]
    programs, tile = _up_tile(w13, UP_ROWS)
    _up_kernel[(programs, chosen + (shared is not None))](
        x, z, experts, weights, *expert_weights(w13, shared), places, counts, chosen, x.shape[1],
        w13.rows // 2, by.limit, w13.num_steps, w13.packed.shape[1],
        PARTS=w13.global_scale.shape[1],
        SHARED_PARTS=1 if shared is None else shared.global_scale.shape[0],
        PLACED=places is not None, U=tile, **dependent_options(x.device, 2),
    )  # fmt: skip


def launch_routed(x, token_ids, gate, by):
    """`router` and `launch`, with the shared expert's up-projection overlapping the gate."""
    num_experts, size = gate.gate.shape
    w13, w2, shared = stack_of(by.w13), stack_of(by.w2), by.shared_w13
    ranges, per_range = num_ranges(num_experts, size)
    tensors, sizes = prepare(x, token_ids, gate, ranges)
    counters = workspace(x.device, "counters", 1, torch.int32)
    z = _between(x, gate.num_chosen, w2)
    gate_tiles = triton.cdiv(num_experts, GATE_ROWS)
    programs, tile = _up_tile(shared, *choose_shared(shared))
    _gate_kernel[(gate_tiles * ranges + programs,)](
        x, gate.gate, counters, tensors, size, num_experts, per_range, gate_tiles, gate.scaling,
        z, expert_weights(shared, None)[0], w2.columns, by.limit, w13.num_steps,
        GATE_ROWS=GATE_ROWS, PARTS=shared.global_scale.shape[0], EVEN_K=size % 128 == 0,
        G=sizes, U=tile, **dependent_options(x.device, 2),
    )  # fmt: skip
    if _is_stream(x, w13, w2):
        module = import_module("dsv4.ops.moe.experts_stream_gluon")
        given = (x, z, tensors.chosen, tensors.weights, w13, w2, by.shared_w2, by.limit)
        return module.run(*given, table_of(by.w13))
    _up(x, z, tensors.chosen, tensors.weights, by, None)
    return _down(z, tensors.chosen, by)


def _is_stream(x, w13, w2) -> bool:
    return w13.columns % 128 == w2.columns % 128 == 0 and streams(x.device)


def separate_streams(x, by) -> bool:
    """Whether `launch_separate` runs these experts."""
    shared = by.shared_w13, by.shared_w2
    if not all(isinstance(w, Fp8BlockTensor) and linear_triton.streams_stored(w) for w in shared):
        return False
    w13, w2 = stack_of(by.w13), stack_of(by.w2)
    return by.shared_w2.shape[1] == w2.columns and _is_stream(x, w13, w2)


def launch_separate(x, token_ids, gate, by):
    """`launch_routed` with an FP8 shared expert, on sm_90: its matrices have their own launches."""
    module = import_module("dsv4.ops.moe.experts_stream_gluon")
    w13, w2, table = stack_of(by.w13), stack_of(by.w2), table_of(by.w13)
    chosen, weights = router_triton.run(x, token_ids, gate)
    ranges, rows = split_k(by.shared_w13)[0], by.shared_w13.shape[0]
    sums = workspace(x.device, "shared_sums", ranges * rows, torch.float32)[: ranges * rows]
    linear_triton.launch(x, [by.shared_w13], [sums.view(ranges, 1, rows)], partial=True)
    z, last = _between(x, gate.num_chosen, w2), gate.num_chosen * w2.columns
    expert_sums = partial_sums(z, gate.num_chosen + 1, w2)
    given = (x, z, chosen, weights, w13, w2, by.limit, table)
    module.up(*given, sums.view(ranges, rows), expert_sums[-1, 1:])
    linear_triton.launch(
        z[last : last + w2.columns].view(1, -1), [by.shared_w2], [expert_sums[-1, :1]]
    )
    module.down(z, expert_sums, chosen, w2, None, table, early=True)
    return expert_sums


def _between(x, chosen, w2):
    return workspace(x.device, "experts_z", (chosen + 1) * w2.columns, torch.bfloat16)


def _down(z, experts, by):
    places, w2, shared_w2 = table_of(by.w2)[0], stack_of(by.w2), by.shared_w2
    chosen = experts.shape[1]
    expert_sums = partial_sums(z, chosen + (shared_w2 is not None), w2)
    _down_kernel[(triton.cdiv(w2.rows, 64), *expert_sums.shape[:2])](
        z, expert_sums, experts, *expert_weights(w2, shared_w2), places, chosen, w2.rows,
        w2.columns, w2.num_steps, w2.packed.shape[1], RANGES=expert_sums.shape[1], STAGES=STAGES,
        EVEN_K=w2.columns % 128 == 0, ASM=not interpreting(), MX=is_mx(w2),
        PLACED=places is not None, **dependent_options(z.device, 2),
    )  # fmt: skip
    return expert_sums


def choose_shared(w13) -> tuple[int, int]:
    """Weight rows per program and pipeline stages beside the gate; timed for V4-Flash and V4-Pro
    (docs/LOG.md)."""
    return (16, 4) if w13.num_steps <= 32 else (32, 8)


def _up_tile(w13, rows, stages=STAGES) -> tuple[int, UpTile]:
    """Number of programs for a matrix, `rows` weight rows each, and their constants."""
    ranges = num_expert_ranges(w13)
    rows, even = rows if ranges > 1 else 64, w13.columns % (128 * ranges) == 0
    tile = UpTile(ranges, rows, stages, even, not interpreting(), is_mx(w13))
    return triton.cdiv(w13.rows, rows), tile
