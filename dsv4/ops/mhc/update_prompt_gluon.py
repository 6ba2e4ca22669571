# mypy: ignore-errors
"""The first launch of mHC for prompts on sm_90, in Gluon: what update_triton.py computes for many
tokens, with the same bits.

One warp copies chunks of 32 channels into a ring: all streams and the half-block's result of 128
tokens, and the matrix that reads them. Two groups of four warps each take 64 of the tokens. A
thread has four adjacent channels of two tokens, as a product has them once columns are permuted
within 16, so new streams go from registers into products; they also replace the old ones in the
ring, from where copies take them to memory.

The matrix is split into three bf16 parts beforehand, in the order of the ring.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
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
from dsv4.ops.core.helpers_device import narrow, widen
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.variants.prompt_gluon import joined, tma_load, tma_store
from dsv4.ops.mhc.update_triton import CHANNELS, GROUPS

rounded, widened = gluon.jit(narrow.fn), gluon.jit(widen.fn)
N, EIGHT = gl.constexpr(4), gl.constexpr(GROUPS)  # streams; groups of chunks
TOKENS, WIDTH, RPAD = gl.constexpr(64), gl.constexpr(CHANNELS), gl.constexpr(32)
TEAMS = gl.constexpr(2)  # groups of four warps, TOKENS each
PARTS, LINES = gl.constexpr(3), gl.constexpr(64)  # of a chunk of the matrix: halves of 32 rows
STAGES, REGISTERS, COPY_REGISTERS = 3, 240, 24
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)
TOKEN = gl.constexpr(gl.SliceLayout(1, TILE))


class Ring(NamedTuple):
    """Chunks of streams and results, and of the matrix; which stages are filled, which free."""

    tiles: object  # [stage, team, stream or result]
    parts: object
    full: object
    empty: object


class UpdateWork(NamedTuple):
    """Items: a group of chunks of a tile of tokens."""

    num_tokens: int
    size: int  # channels
    members: int  # chunks of a group
    items: int


@triton.jit
def _matrix_parts_kernel(fn, parts, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Two streams of a chunk of `fn` `[ROWS, 4 D]` -> bf16 `[high, middle, low; half; 32 rows; 2
    streams, 32]`, columns permuted as in `_operand`: what is stored is in order."""
    chunk, half = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, 32)[:, None]
    to = tl.arange(0, 2 * BD)[None, :]
    column = to // 16 * 16 + to % 8 // 2 * 4 + to % 16 // 8 * 2 + to % 2
    at = row * (4 * D) + (half * 2 + column // BD) * D + chunk * BD + column % BD
    f = tl.load(fn + at, mask=(row < ROWS) & (to >= 0), other=0.0)
    high = f.to(tl.bfloat16)
    rest = f - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    to += (chunk * 192 + half * 32 + row) * 64
    tl.store(parts + to, high)
    tl.store(parts + to + 64 * 64, middle)
    tl.store(parts + to + 128 * 64, low)


@gluon.jit
def _copy(streams, y, parts, b, work, STAGES: gl.constexpr):
    """The job of the copying warp."""
    at = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        group = item % EIGHT
        token = item // EIGHT * (TEAMS * TOKENS)
        for member in range(0, work.members):
            chunk = member * EIGHT + group
            slot = at % STAGES
            full = b.full.index(slot)
            mbarrier.wait(b.empty.index(slot), (at // STAGES + 1) & 1)
            mbarrier.expect(full, (TEAMS * (N + 1) * TOKENS * WIDTH + PARTS * LINES * 64) * 2)
            for i in gl.static_range(PARTS):
                place = [(chunk * PARTS + i) * LINES, 0]
                tma_load(parts, place, full, b.parts.index(slot * PARTS + i))
            for team in gl.static_range(TEAMS):
                row = token + team * TOKENS
                first = (slot * TEAMS + team) * (N + 1)
                tma_load(y, [row, chunk * WIDTH], full, b.tiles.index(first + N))
                for j in gl.static_range(N):
                    place = [row, j * work.size + chunk * WIDTH]
                    tma_load(streams, place, full, b.tiles.index(first + j))
            at += 1


@gluon.jit
def _coefficients(post, comb, token, live):
    """Per token and new stream: the coefficients of the old streams, then the one of `y`."""
    found = ()
    for k in gl.static_range(N):
        for j in gl.static_range(N):
            found = joined(found, gl.load(comb + token * (N * N) + j * N + k, mask=live, other=0.0))
        found = joined(found, gl.load(post + token * N + k, mask=live, other=0.0))
    return found


@gluon.jit
def _operand(first, second):
    """Two streams `[64, 32]` as columns of a product, permuted within 16."""
    both = gl.permute(gl.join(first, second), [0, 2, 1]).reshape([TOKENS, 4, 4, 2, 2])
    both = gl.permute(both, [0, 1, 3, 2, 4]).reshape([TOKENS, 64])
    return gl.convert_layout(both, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _sum_of_channels(x):
    """Of `[64, 32]` along the channels, neighbours first."""
    x = x.reshape([TOKENS, 2, 2, 2, 2, 2])
    for level in gl.static_range(5):
        x = gl.sum(x, axis=5 - level)
    return x


@gluon.jit
def _chunk(b, slot, place, out, coefficients, row, column, size):
    """New streams of a chunk, on their way to memory; their products `[64, 32]`, and the sum of
    their squares `[64]`. `place`: of the tiles, a stream each, then the result's."""
    new = widened(b.tiles.index(place + N).load(TILE), True)
    old = ()
    for j in gl.static_range(N):
        old = joined(old, widened(b.tiles.index(place + j).load(TILE), True))
    made = ()
    squares = gl.zeros([TOKENS, WIDTH], gl.float32, TILE)
    for k in gl.static_range(N):
        v = gl.zeros([TOKENS, WIDTH], gl.float32, TILE)
        for j in gl.static_range(N):
            m = gl.expand_dims(coefficients[k * (N + 1) + j], 1) + gl.zeros_like(v)
            v = gl.fma(old[j], m, v)
        m = gl.expand_dims(coefficients[k * (N + 1) + N], 1) + gl.zeros_like(v)
        v = rounded(gl.fma(new, m, v), gl.bfloat16, True)
        b.tiles.index(place + k).store(v)
        made = joined(made, v)
        v = widened(v, True)
        squares = gl.fma(v, v, squares)
    fence_async_shared()
    for k in gl.static_range(N):
        tma_store(out, [row, k * size + column], b.tiles.index(place + k))
    halves = (_operand(made[0], made[1]), _operand(made[2], made[3]))
    sums = ()
    for part in gl.static_range(3):
        product = gl.zeros([TOKENS, RPAD], gl.float32, SUMS)
        for half in gl.static_range(2):
            lines = (
                b.parts.index(slot * PARTS + part).slice(half * RPAD, RPAD, dim=0).permute((1, 0))
            )
            product = warpgroup_mma(halves[half], lines, product, use_acc=half > 0, is_async=True)
        sums = joined(sums, product)
    squares = gl.reshape(_sum_of_channels(squares), [TOKENS])
    high, middle, low = warpgroup_mma_wait(0, deps=sums)
    return high + (middle + low), squares


@gluon.jit
def _update(team, out, post, comb, partials, b, work, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """The job of a group of four warps."""
    at = 0
    for item in range(gl.program_id(0), work.items, gl.num_programs(0)):
        group = item % EIGHT
        first = item // EIGHT * (TEAMS * TOKENS) + team * TOKENS
        token = first + gl.arange(0, TOKENS, layout=TOKEN)
        coefficients = _coefficients(post, comb, token.to(gl.int64), token < work.num_tokens)
        total = gl.zeros([TOKENS, RPAD], gl.float32, SUMS)
        total_squares = gl.zeros([TOKENS], gl.float32, TOKEN)
        for member in range(0, work.members):
            slot = at % STAGES
            column = (member * EIGHT + group) * WIDTH
            mbarrier.wait(b.full.index(slot), at // STAGES & 1)
            place = slot * TEAMS + team
            sums, squares = _chunk(
                b, slot, place * (N + 1), out, coefficients, first, column, work.size
            )
            total = total + sums
            total_squares = total_squares + gl.convert_layout(squares, TOKEN)
            tma.store_wait(4)  # those of this chunk go on; the stage before is free again
            mbarrier.arrive(b.empty.index((at + STAGES - 1) % STAGES), count=1, pred=at > 0)
            at += 1
        line = (group * work.num_tokens + token).to(gl.int64) * RPAD
        gl.store(partials + line + ROWS, total_squares, mask=token < work.num_tokens)
        token = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SUMS))
        line = (group * work.num_tokens + token).to(gl.int64) * RPAD
        row = gl.expand_dims(gl.arange(0, RPAD, layout=gl.SliceLayout(0, SUMS)), 0)
        used = gl.expand_dims(token < work.num_tokens, 1) & (row < ROWS)
        gl.store(partials + gl.expand_dims(line, 1) + row, total, mask=used)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens", "items"])
def _update_prompt_kernel(
    streams, y, parts, out, post, comb, partials, num_tokens, size, members, items,
    ROWS: gl.constexpr, STAGES: gl.constexpr, NUM_REGISTERS: gl.constexpr,
    NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    b = Ring(
        gl.allocate_shared_memory(
            gl.bfloat16, [STAGES * TEAMS * (N + 1), TOKENS, WIDTH], streams.layout
        ),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, LINES, 64], parts.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(b.full.index(i), count=1)
        mbarrier.init(b.empty.index(i), count=TEAMS)
    work = UpdateWork(num_tokens, size, members, items)
    gl.warp_specialize(
        [
            (_update, (0, out, post, comb, partials, b, work, ROWS, STAGES)),
            (_update, (1, out, post, comb, partials, b, work, ROWS, STAGES)),
            (_copy, (streams, y, parts, b, work, STAGES)),
        ],
        [4, 1], [NUM_REGISTERS, NUM_COPY_REGISTERS],
    )  # fmt: skip


def fits(streams, y, rpad: int) -> bool:
    """Whether `launch` takes these: bf16, whole groups of chunks, `partials` of 32 numbers."""
    whole = streams.shape[2] % (CHANNELS * GROUPS) == 0 and rpad == int(RPAD)
    aligned = all(value.data_ptr() % 16 == 0 for value in (streams, y))
    return whole and aligned and streams.dtype == torch.bfloat16


def launch(streams, y, post, comb, fn, out, partials) -> None:
    """Updated `streams` in `out`; the groups' sums, of 32 numbers a token, in `partials`."""
    tokens, n, size = streams.shape
    chunks, num_rows = size // CHANNELS, fn.shape[0]
    parts = workspace(streams.device, "mhc_parts", chunks * 192 * 64, torch.bfloat16)
    parts = parts[: chunks * 192 * 64].view(-1, 64)
    _matrix_parts_kernel[(chunks, 2)](
        fn, parts, ROWS=num_rows, D=size, BD=CHANNELS, **launch_options(4)
    )
    items = GROUPS * triton.cdiv(tokens, int(TEAMS) * int(TOKENS))
    tile, block = gl.NVMMASharedLayout(64, 16, 2), [int(TOKENS), CHANNELS]
    matrix = gl.NVMMASharedLayout(128, 16, 2)
    _update_prompt_kernel[(min(describe(streams.device).multiprocessors, items),)](
        TensorDescriptor.from_tensor(streams.view(tokens, n * size), block, tile),
        TensorDescriptor.from_tensor(y, block, tile),
        TensorDescriptor.from_tensor(parts, [int(LINES), 64], matrix),
        TensorDescriptor.from_tensor(out.view(tokens, n * size), block, tile),
        post, comb, partials, tokens, size, chunks // GROUPS, items, ROWS=num_rows, STAGES=STAGES,
        NUM_REGISTERS=REGISTERS, NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=4,
    )  # fmt: skip
