# mypy: ignore-errors
"""`experts` on a GPU. Two passes over tiled NVFP4 weights: gate and up with SwiGLU, then down.

A tile is up to BM rows of one expert; the shared expert is one more, whose rows are all tokens.
One token needs no sorting: each of its experts is a tile of one row. How many tiles a prompt needs
is known on the device alone: half as many programs as there could be tiles walk them. Parts go to
a buffer and are added by whoever reads the row next, or by a small kernel: ranges of K first, then
the token's experts in order, the shared one last. Long K is summed in two ranges, which with one
token are programs of their own: their number, not memory, limits how fast few rows go.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4.ops.device import (
    append,
    device_reason,
    dot_nvfp4,
    finish_ranges,
    interpreting,
    launch_options,
    tile_rows,
    times_rounded,
    workspace,
)
from dsv4.ops.gemm.packed import TiledNvfp4
from dsv4.ops.moe.route_triton import Route, route
from dsv4.ops.moe.shared_triton import combine, is_apart, shared_part, shared_reason

TALL = 256  # rows of tiles in prompts, of which as many are multiplied as there are
LONG_STEPS = 8  # of 128 columns: from here on K has two ranges


@triton.constexpr_function
def tile_heights(most):
    """Rows that are multiplied for a tile of up to `most`: the fewest of these that hold its rows.
    The branch is taken once for a tile; a loop along K knows nothing of it."""
    return (64, 128, 192, 256) if most == 256 else (most,)


@triton.jit
def _is_height(num_rows, PLACE: tl.constexpr, BM: tl.constexpr):
    """Whether the height at PLACE is the lowest that holds `num_rows`, or the last one."""
    found = num_rows > (0 if PLACE == 0 else tile_heights(BM)[PLACE - 1])
    if len(tile_heights(BM)) > PLACE + 1:
        found = found & (num_rows <= tile_heights(BM)[PLACE])
    return found


@triton.jit
def _tile(
    index, experts, tile_expert, tile_start, tile_end, num_tiles, chosen, num_experts,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """(expert, first row, one past the expert's last row); expert -1: nothing to do. One token:
    its experts are the tiles, of one row each."""
    if DIRECT:
        routed = index < chosen
        expert = tl.load(experts + index, mask=routed, other=0).to(tl.int32)
        expert = tl.where(routed, expert, num_experts)
        start = index
        end = index + 1
    else:
        listed = index < num_tiles
        expert = tl.load(tile_expert + index, mask=listed, other=-1)
        start = tl.load(tile_start + index, mask=listed, other=0)
        end = tl.load(tile_end + index, mask=listed, other=0)
    return expert, start, end


@triton.jit
def _pair_of(rows, live, sorted_pairs, num_pairs, chosen, DIRECT: tl.constexpr):
    """(token, place) of sorted rows; the shared expert's place is the last."""
    routed = rows < num_pairs
    pair = rows
    if not DIRECT:
        pair = tl.load(sorted_pairs + rows, mask=live & routed, other=0)
    token = tl.where(routed, pair // chosen, rows - num_pairs)
    place = tl.where(routed, pair % chosen, chosen)
    return token, place


@triton.jit
def _range_sums(
    words, scales, x, x_rows, live, total_steps, num_columns, split,
    factor, K_RANGES: tl.constexpr, DIRECT: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, FORM: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """fp32 `[BN, rows]` of each piece: range `split` of K with one token, else all ranges, in
    order; each times `factor`."""
    words = tl.multiple_of(words, 64)
    scales = tl.multiple_of(scales, 64)
    per_range = tl.cdiv(total_steps, K_RANGES)
    totals = ()
    for index in tl.static_range(1 if DIRECT else K_RANGES):
        first = (split if DIRECT else index) * per_range
        parts = dot_nvfp4(
            words, scales, x, x_rows, live, first, tl.minimum(first + per_range, total_steps),
            total_steps, num_columns, BN, STAGES, FORM, EVEN_K, ASM,
        )  # fmt: skip
        added = ()
        for i in tl.static_range(len(parts)):
            before = 0.0 if index == 0 else totals[i]
            added = append(added, before + times_rounded(parts[i], factor, ASM))
        totals = added
    return totals


@triton.jit
def _swiglu(acc, gate_factor, up_factor, limit, BN: tl.constexpr):
    """`[BN, rows]` -> `[BN / 2, rows]`: of each tile's 64 weight rows the first 32 are gates."""
    pairs = acc.reshape(BN // 64, 2, 32, acc.shape[1]).permute(0, 2, 3, 1)
    gate, up = tl.split(pairs)
    gate = tl.minimum(gate.reshape(BN // 2, acc.shape[1]) * gate_factor, limit)
    up = tl.minimum(tl.maximum(up.reshape(BN // 2, acc.shape[1]) * up_factor, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _up_rows(
    x, x_stride, z, weights, sorted_pairs, words, scales, gate_factor, up_factor,
    start, end, num_pairs, chosen, is_shared, index, size, inner, limit, total_steps,
    partials, counters,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    K_RANGES: tl.constexpr, DIRECT: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Up to BM rows of a tile."""
    n_tile = tl.program_id(0)
    rows, live = tile_rows(start, end, BM)
    x_rows = ()
    for i in tl.static_range(len(rows)):
        token, _ = _pair_of(rows[i], live[i], sorted_pairs, num_pairs, chosen, DIRECT)
        x_rows = append(x_rows, tl.where(live[i], token, 0) * x_stride)
    sums = _range_sums(
        words, scales, x, x_rows, live, total_steps, size, tl.program_id(2), 1.0,
        K_RANGES, DIRECT, BN, STAGES, FORM, EVEN_K, ASM,
    )  # fmt: skip
    last_column = inner
    if DIRECT and K_RANGES > 1:
        slot = (index * tl.num_programs(0) + n_tile) * K_RANGES
        acc, is_last = finish_ranges(
            sums[0], live[0], partials, counters, slot, tl.program_id(2), K_RANGES, BN, BM
        )
        sums = (acc,)
        last_column = tl.where(is_last, inner, 0)
    column = n_tile * (BN // 2) + tl.arange(0, BN // 2)
    for i in tl.static_range(len(sums)):
        result = _swiglu(sums[i], gate_factor, up_factor, limit, BN)
        if not is_shared:
            weight_rows = rows[i]
            if not DIRECT:
                weight_rows = tl.load(sorted_pairs + rows[i], mask=live[i], other=0)
            result = result * tl.load(weights + weight_rows, mask=live[i], other=0.0)[None, :]
        mask = (column < last_column)[:, None] & live[i][None, :]
        out = z + rows[i].to(tl.int64)[None, :] * inner + column[:, None]
        tl.store(out, result.to(tl.bfloat16), mask=mask)


@triton.jit
def _up_tile(
    tile, index, x, x_stride, z, weights, sorted_pairs,
    words, scales, factors, shared_words, shared_scales, shared_factors,
    num_pairs, chosen, num_experts, size, inner, limit, total_steps, expert_tiles,
    partials, counters,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr,
    K_RANGES: tl.constexpr, DIRECT: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    expert, start, end = tile
    is_shared = expert == num_experts
    at = tl.where(is_shared, shared_factors, expert * PARTS)
    parts = tl.where(is_shared, SHARED_PARTS, PARTS)
    gate_factor = tl.load(factors + at) * 128.0
    up_factor = tl.load(factors + at + parts - 1) * 128.0
    first = tl.where(is_shared, 0, expert).to(tl.int64) * expert_tiles
    first += tl.program_id(0) * (BN // 64)
    word_at = tl.where(is_shared, shared_words, 0) + first * total_steps * 2048
    scale_at = tl.where(is_shared, shared_scales, 0) + first * total_steps * 256
    for i in tl.static_range(len(tile_heights(BM))):
        if len(tile_heights(BM)) == 1 or _is_height(end - start, i, BM):
            _up_rows(
                x, x_stride, z, weights, sorted_pairs, words + word_at, scales + scale_at,
                gate_factor, up_factor, start, end, num_pairs, chosen, is_shared, index,
                size, inner, limit, total_steps, partials, counters,
                tile_heights(BM)[i], BN, STAGES, FORM, K_RANGES, DIRECT, EVEN_K, ASM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _up_kernel(
    x, x_stride, z, experts, weights, sorted_pairs, tile_expert, tile_start, tile_end, num_live,
    words, scales, factors, shared_words, shared_scales, shared_factors,
    num_pairs, num_tiles, chosen, num_experts, size, inner, limit,
    total_steps, expert_tiles, partials, counters,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, WALK: tl.constexpr,
    K_RANGES: tl.constexpr, DIRECT: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """`shared_*` are distances in elements from the routed experts' tensors. WALK: there are
    fewer programs than tiles in the list."""
    listed = (experts, tile_expert, tile_start, tile_end, num_tiles, chosen, num_experts)
    rest = (
        x, x_stride, z, weights, sorted_pairs,
        words, scales, factors, shared_words, shared_scales, shared_factors,
        num_pairs, chosen, num_experts, size, inner, limit, total_steps, expert_tiles,
        partials, counters,
    )  # fmt: skip
    own = tl.program_id(1)
    tile = _tile(own, *listed, DIRECT)
    if WALK:
        # what is the same for all tiles is made for each again, else it takes the sums' registers
        for index in tl.range(own, tl.load(num_live), tl.num_programs(1), disable_licm=True):
            following = _tile(index + tl.num_programs(1), *listed, DIRECT)
            _up_tile(
                tile, index, *rest, BM, BN, STAGES, FORM, PARTS, SHARED_PARTS,
                K_RANGES, DIRECT, EVEN_K, ASM,
            )  # fmt: skip
            tile = following
    elif tile[0] >= 0:
        _up_tile(
            tile, own, *rest, BM, BN, STAGES, FORM, PARTS, SHARED_PARTS,
            K_RANGES, DIRECT, EVEN_K, ASM,
        )  # fmt: skip


@triton.jit
def _down_rows(
    z, parts_at, sorted_pairs, words, scales, factor, start, end, num_pairs, chosen, places,
    size, inner, total_steps,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    K_RANGES: tl.constexpr, DIRECT: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Up to BM rows of a tile."""
    rows, live = tile_rows(start, end, BM)
    z_rows = ()
    for i in tl.static_range(len(rows)):
        z_rows = append(z_rows, rows[i] * inner)
    sums = _range_sums(
        words, scales, z, z_rows, live, total_steps, inner, tl.program_id(2), factor,
        K_RANGES, DIRECT, BN, STAGES, FORM, EVEN_K, ASM,
    )  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    for i in tl.static_range(len(sums)):
        token, place = _pair_of(rows[i], live[i], sorted_pairs, num_pairs, chosen, DIRECT)
        row = token.to(tl.int64) * places + place
        if DIRECT:
            row = row * K_RANGES + tl.program_id(2)
        mask = (column < size)[:, None] & live[i][None, :]
        tl.store(parts_at + (row * size)[None, :] + column[:, None], sums[i], mask=mask)


@triton.jit
def _down_tile(
    tile, z, parts_at, sorted_pairs,
    words, scales, factors, shared_words, shared_scales, shared_factors,
    num_pairs, chosen, places, num_experts, size, inner, total_steps, expert_tiles,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    K_RANGES: tl.constexpr, DIRECT: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    expert, start, end = tile
    is_shared = expert == num_experts
    factor = tl.load(factors + tl.where(is_shared, shared_factors, expert)) * 128.0
    first = tl.where(is_shared, 0, expert).to(tl.int64) * expert_tiles
    first += tl.program_id(0) * (BN // 64)
    word_at = tl.where(is_shared, shared_words, 0) + first * total_steps * 2048
    scale_at = tl.where(is_shared, shared_scales, 0) + first * total_steps * 256
    for i in tl.static_range(len(tile_heights(BM))):
        if len(tile_heights(BM)) == 1 or _is_height(end - start, i, BM):
            _down_rows(
                z, parts_at, sorted_pairs, words + word_at, scales + scale_at, factor,
                start, end, num_pairs, chosen, places, size, inner, total_steps,
                tile_heights(BM)[i], BN, STAGES, FORM, K_RANGES, DIRECT, EVEN_K, ASM,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _down_kernel(
    z, parts_at, experts, sorted_pairs, tile_expert, tile_start, tile_end, num_live,
    words, scales, factors, shared_words, shared_scales, shared_factors,
    num_pairs, num_tiles, chosen, places, num_experts, size, inner, total_steps, expert_tiles,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
    WALK: tl.constexpr,
    K_RANGES: tl.constexpr, DIRECT: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_up_kernel`."""
    listed = (experts, tile_expert, tile_start, tile_end, num_tiles, chosen, num_experts)
    rest = (
        z, parts_at, sorted_pairs,
        words, scales, factors, shared_words, shared_scales, shared_factors,
        num_pairs, chosen, places, num_experts, size, inner, total_steps, expert_tiles,
    )  # fmt: skip
    own = tl.program_id(1)
    tile = _tile(own, *listed, DIRECT)
    if WALK:
        for index in tl.range(own, tl.load(num_live), tl.num_programs(1), disable_licm=True):
            following = _tile(index + tl.num_programs(1), *listed, DIRECT)
            _down_tile(tile, *rest, BM, BN, STAGES, FORM, K_RANGES, DIRECT, EVEN_K, ASM)
            tile = following
    elif tile[0] >= 0:
        _down_tile(tile, *rest, BM, BN, STAGES, FORM, K_RANGES, DIRECT, EVEN_K, ASM)


@dataclass(frozen=True)
class Config:
    bm: int
    bn: int
    num_warps: int
    num_stages: int
    form: int = 0  # of the product; see dot_nvfp4


def choose_config(num_tokens: int, chosen: int, num_experts: int) -> Config:
    """By the rows an expert gets when routing is even; tiles of one expert share its weights."""
    rows = num_tokens * chosen / num_experts
    if rows <= 4:
        return Config(8, 64, 2, 3)
    if rows <= 10:
        return Config(16, 64, 2, 3)
    if rows <= 28:
        return Config(32, 128, 4, 3, 1)
    if rows <= 56:
        return Config(64, 128, 4, 3, 1)
    return Config(TALL, 128, 8, 3, 1)


def supports(x, experts, weights, w13, w2, shared_w13, shared_w2, limit) -> str | None:
    if experts.dtype != torch.int64 or weights.dtype != torch.float32:
        return f"experts are {experts.dtype}, weights {weights.dtype}; expected int64 and float32"
    if not (experts.is_contiguous() and weights.is_contiguous()):
        return "experts and weights are not contiguous"
    return weights_reason(x, w13, w2, shared_w13, shared_w2)


def weights_reason(x, w13, w2, shared_w13, shared_w2) -> str | None:
    reason = device_reason(x.device)
    if reason is not None:
        return reason
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1:
        return f"x is {x.dtype} with strides {x.stride()}, kernels read bfloat16 rows"
    named = {"w13": w13, "w2": w2}
    if is_apart(shared_w13):
        reason = shared_reason(shared_w13, shared_w2)
        if reason is not None:
            return reason
    else:
        named |= {"shared_w13": shared_w13, "shared_w2": shared_w2}
    for name, weight in named.items():
        if not isinstance(weight, TiledNvfp4):
            return f"{name} is {type(weight).__name__}; kernels read NVFP4 after repack_weights"
        if weight.paired != name.endswith("w13"):
            return f"{name} is tiled for another use"
    if not is_apart(shared_w13) and shared_w2.columns != w2.columns:
        return f"the shared expert is {shared_w2.columns} wide, the others {w2.columns}"
    return None


def run(x, experts, weights, w13, w2, shared_w13, shared_w2, limit):
    return launch(x, experts, weights, w13, w2, shared_w13, shared_w2, limit)


def launch(
    x, experts, weights, w13, w2, shared_w13, shared_w2, limit, *, up=None, down=None,
    parts_only=False, ready=None,
):  # fmt: skip
    """`shared_w13` and `shared_w2` may be None: the routed experts alone. With `parts_only` the
    result is fp32 `[tokens, places, ranges, size]`, not summed. `ready`: rows of `x` for a shared
    expert that is apart."""
    num_tokens, chosen = experts.shape
    size, inner, num_experts = w2.rows, w2.columns, w2.shape[0]
    up = up or choose_config(num_tokens, chosen, num_experts)
    down = down or up
    extra = None
    if shared_w13 is not None and is_apart(shared_w13):
        extra = shared_part(x, shared_w13, shared_w2, limit, ready)
        shared_w13 = shared_w2 = None
    direct = num_tokens == 1
    shared = shared_w13 is not None
    places = chosen + (1 if shared else 0)
    num_pairs, num_tiles = num_tokens * chosen, places
    table = None
    if not direct:
        table = route(experts, num_experts, up.bm, shared=shared)
        num_tiles = table.num_tiles
    z_rows = num_pairs + num_tokens
    z = workspace(x.device, "experts_z", z_rows * inner, torch.bfloat16)
    tiles = _table(table, experts)
    counts = (num_pairs, num_tiles, chosen)
    walk = up.bm == TALL
    programs = triton.cdiv(num_tiles, 2) if walk else num_tiles  # a program of no tile takes time
    common = {"DIRECT": direct, "ASM": not interpreting(), "BM": up.bm, "WALK": walk}
    ranges, down_ranges = num_expert_ranges(w13), num_expert_ranges(w2)
    up_tiles, n_tiles = triton.cdiv(2 * inner, up.bn), triton.cdiv(size, down.bn)
    slots = up_tiles * num_tiles * ranges if direct else 1
    partials = workspace(x.device, "partials", slots * up.bm * up.bn, torch.float32)
    counters = workspace(x.device, "counters", slots, torch.int32)
    _up_kernel[(up_tiles, programs, ranges if direct else 1)](
        x, x.stride(0), z, experts, weights, *tiles, *_weights(w13, shared_w13),
        *counts, num_experts, size, inner, limit, w13.num_steps, w13.packed.shape[1],
        partials, counters, K_RANGES=ranges,
        BN=up.bn, STAGES=up.num_stages, FORM=up.form,
        PARTS=w13.global_scale.shape[1],
        SHARED_PARTS=shared_w13.global_scale.shape[0] if shared else 1,
        EVEN_K=size % 128 == 0, **common, **launch_options(up.num_warps),
    )  # fmt: skip
    apart = down_ranges if direct else 1
    shape = (num_tokens, places, apart, size)
    parts = workspace(x.device, "experts_parts", math.prod(shape), torch.float32)
    _down_kernel[(n_tiles, programs, apart)](
        z, parts, experts, *tiles, *_weights(w2, shared_w2),
        *counts, places, num_experts, size, inner, w2.num_steps, w2.packed.shape[1],
        BN=down.bn, STAGES=down.num_stages, FORM=down.form,
        EVEN_K=inner % 128 == 0, K_RANGES=down_ranges,
        **common, **launch_options(down.num_warps),
    )  # fmt: skip
    if parts_only:
        return parts[: math.prod(shape)].view(shape)
    y = torch.empty_like(x)
    combine(parts, extra, y, places, apart)
    return y


def num_expert_ranges(weight) -> int:
    """Of K; a pure function of the shape, because it fixes the order of summation."""
    return 2 if weight.num_steps >= LONG_STEPS else 1


def _table(table: Route | None, experts) -> tuple[torch.Tensor, ...]:
    if table is None:
        return (experts,) * 5  # not read
    return table.sorted_pairs, table.tile_expert, table.tile_start, table.tile_end, table.num_live


def _weights(weight, shared):
    """Tensors of the routed experts and how far behind them the shared expert's lie."""
    parts = (weight.packed, weight.scale, weight.global_scale)
    if shared is None:
        return (*parts, 0, 0, 0)
    others = (shared.packed, shared.scale, shared.global_scale)
    pairs = zip(parts, others, strict=True)
    return (*parts, *((b.data_ptr() - a.data_ptr()) // a.element_size() for a, b in pairs))
