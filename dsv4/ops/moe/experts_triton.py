# mypy: ignore-errors
"""`experts` on a GPU. Two passes over tiled FP4 weights: gate and up with SwiGLU, then down.

A tile is up to BM rows of one expert; the shared expert is one more, with all tokens as rows. A
single token has its own kernels (`experts_single_token_triton.py`). Partial sums go to a buffer and
a small kernel adds them: K ranges first, then the token's experts in order, the shared one last.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.gpu import Gpu, describe
from dsv4.ops.core.helpers_device import append, depend, times_rounded
from dsv4.ops.core.launch import dependent_options, device_reason, interpreting, rows_reason
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.dot_device import dot_nvfp4, dot_two_ranges, tile_rows
from dsv4.ops.gemm.weights.tiled import TiledFp4
from dsv4.ops.moe import experts_single_token_triton
from dsv4.ops.moe.expert_tensors import expert_weights, is_mx, num_expert_ranges
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.experts_end_triton import (
    combine,
    is_separate,
    shared_output,
    shared_reason,
    swiglu,
)
from dsv4.ops.moe.group_by_expert_triton import group_by_expert
from dsv4.ops.moe.placed import stack_of, table_of

EARLY_TOKENS = 32  # up to here launches start early; more programs would crowd
TALL = 256  # rows per tile in prompts; only the rows present are multiplied


@triton.constexpr_function
def tile_heights(most):
    """Heights at which a tile of up to `most` rows may be multiplied; the smallest that fits is
    used. The branch is taken once per tile, outside the loop over K."""
    return (64, 128, 192, 256) if most == 256 else (most,)


@triton.jit
def _is_height(num_rows, PLACE: tl.constexpr, BM: tl.constexpr):
    """Whether the height at PLACE is the smallest that fits `num_rows`, or the last one."""
    found = num_rows > (0 if PLACE == 0 else tile_heights(BM)[PLACE - 1])
    if len(tile_heights(BM)) > PLACE + 1:
        found = found & (num_rows <= tile_heights(BM)[PLACE])
    return found


class ExpertTile(NamedTuple):
    """Constants of a launch: a program's tile, and how it multiplies."""

    bm: int
    bn: int
    stages: int
    variant: int  # see dot_nvfp4
    k_ranges: int
    side_by_side: bool  # both ranges at a time (dot_two_ranges)
    even_k: bool
    asm: bool
    mx: bool
    placed: bool  # experts have blocks of their own (placed.py)


@triton.jit
def _weights_at(
    expert, shared_words, shared_scales, places, num_experts, total_steps, expert_tiles,
    E: tl.constexpr,
):  # fmt: skip
    """Offsets to the weights of a program's columns; the shared expert's begin at `shared_*`."""
    is_shared = expert == num_experts
    if E.placed:
        at = tl.load(places + expert, mask=expert < num_experts, other=0)
        first = tl.program_id(0).to(tl.int64) * (E.bn // 64)
    else:
        at = 0
        first = tl.where(is_shared, 0, expert).to(tl.int64) * expert_tiles
        first += tl.program_id(0) * (E.bn // 64)
    word_at = tl.where(is_shared, shared_words, at) + first * total_steps * 2048
    scale_at = tl.where(is_shared, shared_scales, at) + first * total_steps * (128 if E.mx else 256)
    return tl.multiple_of(word_at, 64), tl.multiple_of(scale_at, 64)


@triton.jit
def _count_visit(counts, groups, expert, num_experts):
    """One program of an expert's first tile counts the step."""
    tile = tl.program_id(1)
    before = tl.load(groups.tile_expert + tile - 1, mask=tile > 0, other=-1)
    is_first = (before != expert) & (expert < num_experts) & (tl.program_id(0) == 0)
    tl.atomic_add(counts + expert, 1, mask=is_first)


@triton.jit
def _pair_of(rows, live, sorted_pairs, num_pairs, chosen):
    """(token, place) of sorted rows; the shared expert's place is the last."""
    routed = rows < num_pairs
    pair = tl.load(sorted_pairs + rows, mask=live & routed, other=0)
    token = tl.where(routed, pair // chosen, rows - num_pairs)
    place = tl.where(routed, pair % chosen, chosen)
    return token, place


@triton.jit
def _range_sums(words, scales, x, x_rows, live, total_steps, num_columns, factor, E: tl.constexpr):
    """fp32 `[bn, rows]` per piece: all ranges of K in order, each times `factor`."""
    words = tl.multiple_of(words, 64)
    scales = tl.multiple_of(scales, 64)
    RANGES: tl.constexpr = E.k_ranges
    if E.side_by_side:
        tl.static_assert(RANGES == 2)
        earlier, later = dot_two_ranges(
            words, scales, tl.arange(0, E.bn), x, x_rows[0], live[0], total_steps, num_columns,
            E.stages, True, E.asm, E.mx,
        )  # fmt: skip
        total = 0.0 + times_rounded(earlier, factor, E.asm)
        return (total + times_rounded(later, factor, E.asm),)
    per_range = tl.cdiv(total_steps, RANGES)
    totals = ()
    for index in tl.static_range(RANGES):
        first = index * per_range
        parts = dot_nvfp4(
            words, scales, x, x_rows, live, first, tl.minimum(first + per_range, total_steps),
            total_steps, num_columns, E.bn, E.stages, E.variant, E.even_k, E.asm, E.mx,
        )  # fmt: skip
        added = ()
        for i in tl.static_range(len(parts)):
            before = 0.0 if index == 0 else totals[i]
            added = append(added, before + times_rounded(parts[i], factor, E.asm))
        totals = added
    return totals


@triton.jit
def _swiglu(acc, gate_factor, up_factor, limit, BN: tl.constexpr):
    """`[BN, rows]` -> `[BN / 2, rows]`: the first 32 of each tile's 64 weight rows are gates."""
    pairs = acc.reshape(BN // 64, 2, 32, acc.shape[1]).permute(0, 2, 3, 1)
    gate, up = tl.split(pairs)
    gate = gate.reshape(BN // 2, acc.shape[1])
    up = up.reshape(BN // 2, acc.shape[1])
    return swiglu(gate * gate_factor, up * up_factor, limit)


@triton.jit
def _up_rows(
    x, x_stride, z, weights, groups, words, scales, gate_factor, up_factor, start, end, num_pairs,
    chosen, is_shared, size, inner, limit, total_steps, BM: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Up to BM rows of a tile."""
    rows, live = tile_rows(start, end, BM)
    x_rows = ()
    for i in tl.static_range(len(rows)):
        token, _ = _pair_of(rows[i], live[i], groups.sorted_pairs, num_pairs, chosen)
        x_rows = append(x_rows, tl.where(live[i], token, 0) * x_stride)
    sums = _range_sums(words, scales, x, x_rows, live, total_steps, size, 1.0, E)
    column = tl.program_id(0) * (E.bn // 2) + tl.arange(0, E.bn // 2)
    for i in tl.static_range(len(sums)):
        result = _swiglu(sums[i], gate_factor, up_factor, limit, E.bn)
        if not is_shared:
            weight_rows = tl.load(groups.sorted_pairs + rows[i], mask=live[i], other=0)
            result = result * tl.load(weights + weight_rows, mask=live[i], other=0.0)[None, :]
        mask = (column < inner)[:, None] & live[i][None, :]
        out = z + rows[i].to(tl.int64)[None, :] * inner + column[:, None]
        tl.store(out, result.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _up_kernel(
    x, x_stride, z, weights, groups, w, shared_words: tl.int64, shared_scales: tl.int64,
    shared_factors: tl.int64, places, counts, num_pairs, chosen, num_experts, size, inner, limit,
    total_steps, expert_tiles, PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, E: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    depend(DEPENDENT)
    expert = tl.load(groups.tile_expert + tl.program_id(1))
    start = tl.load(groups.tile_start + tl.program_id(1))
    end = tl.load(groups.tile_end + tl.program_id(1))
    if expert < 0:
        return
    is_shared = expert == num_experts
    at = tl.where(is_shared, shared_factors, expert * PARTS)
    parts = tl.where(is_shared, SHARED_PARTS, PARTS)
    gate_factor = tl.load(w.factors + at) * 128.0
    up_factor = tl.load(w.factors + at + parts - 1) * 128.0
    if E.placed:
        _count_visit(counts, groups, expert, num_experts)
    word_at, scale_at = _weights_at(
        expert, shared_words, shared_scales, places, num_experts, total_steps, expert_tiles, E
    )
    for i in tl.static_range(len(tile_heights(E.bm))):
        if len(tile_heights(E.bm)) == 1 or _is_height(end - start, i, E.bm):
            _up_rows(
                x, x_stride, z, weights, groups, w.words + word_at, w.scales + scale_at,
                gate_factor, up_factor, start, end, num_pairs, chosen, is_shared, size, inner,
                limit, total_steps, tile_heights(E.bm)[i], E,
            )  # fmt: skip


@triton.jit
def _down_rows(
    z, partial_sums, groups, words, scales, factor, start, end, num_pairs, chosen, places, size,
    inner, total_steps, BM: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Up to BM rows of a tile."""
    rows, live = tile_rows(start, end, BM)
    z_rows = ()
    for i in tl.static_range(len(rows)):
        z_rows = append(z_rows, rows[i] * inner)
    sums = _range_sums(words, scales, z, z_rows, live, total_steps, inner, factor, E)
    column = tl.program_id(0) * E.bn + tl.arange(0, E.bn)
    for i in tl.static_range(len(sums)):
        token, place = _pair_of(rows[i], live[i], groups.sorted_pairs, num_pairs, chosen)
        row = token.to(tl.int64) * places + place
        mask = (column < size)[:, None] & live[i][None, :]
        tl.store(partial_sums + (row * size)[None, :] + column[:, None], sums[i], mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    z, partial_sums, groups, w, shared_words: tl.int64, shared_scales: tl.int64,
    shared_factors: tl.int64, places, num_pairs, chosen, num_places, num_experts, size, inner,
    total_steps, expert_tiles, E: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    expert = tl.load(groups.tile_expert + tl.program_id(1))  # written two launches ago
    start = tl.load(groups.tile_start + tl.program_id(1))
    end = tl.load(groups.tile_end + tl.program_id(1))
    depend(DEPENDENT)
    if expert < 0:
        return
    is_shared = expert == num_experts
    factor = tl.load(w.factors + tl.where(is_shared, shared_factors, expert)) * 128.0
    word_at, scale_at = _weights_at(
        expert, shared_words, shared_scales, places, num_experts, total_steps, expert_tiles, E
    )
    for i in tl.static_range(len(tile_heights(E.bm))):
        if len(tile_heights(E.bm)) == 1 or _is_height(end - start, i, E.bm):
            _down_rows(
                z, partial_sums, groups, w.words + word_at, w.scales + scale_at, factor, start, end,
                num_pairs, chosen, num_places, size, inner, total_steps, tile_heights(E.bm)[i], E,
            )  # fmt: skip


@dataclass(frozen=True)
class ExpertsConfig:
    bm: int
    bn: int
    num_warps: int
    num_stages: int
    variant: int = 0  # product variant, see ExpertTile
    side_by_side: bool = False  # if K has two ranges of equal length


def choose_config(num_tokens: int, chosen: int, num_experts: int, gpu: Gpu) -> ExpertsConfig:
    """Chosen by the rows per expert under even routing; tiles of an expert share its weights."""
    rows = num_tokens * chosen / num_experts
    if rows <= 4:
        return ExpertsConfig(8, 64, 2, 3, side_by_side=True)
    if rows <= 10:
        return ExpertsConfig(16, 64, 2, 3)
    if gpu.products == "mma":  # joined weights would be taken in another order
        return ExpertsConfig(32, 64, 4, 3) if rows <= 28 else ExpertsConfig(64, 128, 4, 3)
    if rows <= 28:
        return ExpertsConfig(32, 128, 4, 3, 1)
    if rows <= 56:
        return ExpertsConfig(64, 128, 4, 3, 1)
    return ExpertsConfig(TALL, 128, 8, 3, 1)


def supports(x, experts, weights, by) -> str | None:
    return choice_reason(experts, weights) or weights_reason(x, by)


def choice_reason(experts, weights) -> str | None:
    if experts.dtype != torch.int64 or weights.dtype != torch.float32:
        return f"experts are {experts.dtype}, weights {weights.dtype}; expected int64 and float32"
    if not (experts.is_contiguous() and weights.is_contiguous()):
        return "experts and weights are not contiguous"
    return None


def weights_reason(x, by) -> str | None:
    reason = device_reason(x.device) or rows_reason(x)
    w13, w2 = stack_of(by.w13), stack_of(by.w2)
    named = {"w13": w13, "w2": w2}
    if is_separate(by):
        reason = reason or separate_reason(by.shared_w13, by.shared_w2)
    else:
        named |= {"shared_w13": by.shared_w13, "shared_w2": by.shared_w2}
    if reason is not None:
        return reason
    for name, weight in named.items():
        if not isinstance(weight, TiledFp4):
            return f"{name} is {type(weight).__name__}; kernels read FP4 after `repack`"
        if type(weight) is not type(w2):
            return f"{name} is {type(weight).__name__}, w2 {type(w2).__name__}; expected one format"
        if weight.paired != name.endswith("w13"):
            return f"{name} is tiled for another use"
    if not is_separate(by) and by.shared_w2.columns != w2.columns:
        return f"the shared expert is {by.shared_w2.columns} wide, the others {w2.columns}"
    return None


def separate_reason(w13, w2) -> str | None:
    """Why a shared expert in another format cannot run, or None."""
    if not isinstance(w13, TiledFp4):
        return shared_reason(w13, w2)
    if type(w2) is not type(w13) or w2.paired or not w13.paired:
        return "the shared expert's matrices are stored in two ways"
    return None


def separate_output(x, w13, w2, limit):
    """fp32 `[tokens, size]` of a shared expert in any other format."""
    if not isinstance(w13, TiledFp4):
        return shared_output(x, w13, w2, limit)
    only = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
    stack = [weight.map(lambda value: value[None]) for weight in (w13, w2)]
    ones = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
    expert_sums = launch(x, only, ones, Experts(*stack, None, None, limit), partial=True)
    return expert_sums.sum(2).view(x.shape[0], -1)


def run(x, experts, weights, by):
    return launch(x, experts, weights, by)


def launch(x, experts, weights, by, *, partial=False, config=None, gather=None) -> torch.Tensor:
    """With shared matrices None, only the routed experts run. With `partial` the result is the
    partial sums, fp32 `[tokens, places, ranges, size]`. `gather`: see `split_experts`."""
    num_tokens, chosen = experts.shape
    extra = None
    if by.shared_w13 is not None and is_separate(by):
        extra = separate_output(x, by.shared_w13, by.shared_w2, by.limit)
        by = replace(by, shared_w13=None, shared_w2=None)
    if num_tokens == 1:
        expert_sums = experts_single_token_triton.launch(x, experts, weights, by, gather)[None]
    else:
        config = config or choose_config(num_tokens, chosen, by.w2.shape[0], describe(x.device))
        expert_sums = _launch_tiles(x, experts, weights, by, config, gather)
    if partial:
        return expert_sums
    y = torch.empty_like(x)
    early = extra is None and num_tokens <= EARLY_TOKENS
    combine(expert_sums, extra, y, *expert_sums.shape[1:3], early=early)
    return y


def _launch_tiles(x, experts, weights, by, config, gather=None):
    """fp32 partial sums `[tokens, places, 1, size]`."""
    num_tokens, chosen = experts.shape
    places_at, counts = table_of(by.w13)
    w13, w2, shared = stack_of(by.w13), stack_of(by.w2), by.shared_w13
    size, inner, num_experts = w2.rows, w2.columns, w2.shape[0]
    early = num_tokens <= EARLY_TOKENS
    tiles = group_by_expert(experts, num_experts, config.bm, shared=shared is not None, early=early)
    num_pairs, places = num_tokens * chosen, chosen + (shared is not None)
    z = workspace(x.device, "experts_z", (num_pairs + num_tokens) * inner, torch.bfloat16)
    sums = workspace(x.device, "experts_partial_sums", num_tokens * places * size, torch.float32)

    def tile(weight) -> ExpertTile:
        ranges = num_expert_ranges(weight)
        both = config.side_by_side and ranges == 2 and weight.columns % 256 == 0
        return ExpertTile(
            config.bm, config.bn, config.num_stages, config.variant, ranges, both,
            weight.columns % 128 == 0, not interpreting(), is_mx(w2), places_at is not None,
        )  # fmt: skip

    width, own = x.shape[1], w13.rows // 2  # if split: above W2's rows, below its columns
    _up_kernel[(triton.cdiv(2 * own, config.bn), tiles.num_tiles)](
        x, x.stride(0), z, weights, tiles.groups, *expert_weights(w13, shared), places_at, counts,
        num_pairs, chosen, num_experts, width, own, by.limit, w13.num_steps, w13.packed.shape[1],
        PARTS=w13.global_scale.shape[1],
        SHARED_PARTS=1 if shared is None else shared.global_scale.shape[0],
        E=tile(w13), **dependent_options(x.device, config.num_warps, early=early),
    )  # fmt: skip
    if gather is not None:
        z = gather(z[: num_pairs * own].view(num_pairs, own))
    _down_kernel[(triton.cdiv(size, config.bn), tiles.num_tiles)](
        z, sums, tiles.groups, *expert_weights(w2, by.shared_w2), places_at, num_pairs,
        chosen, places, num_experts, size, inner, w2.num_steps, w2.packed.shape[1],
        E=tile(w2), **dependent_options(x.device, config.num_warps, early=early),
    )  # fmt: skip
    return sums[: num_tokens * places * size].view(num_tokens, places, 1, size)
