# mypy: ignore-errors
"""mHC on a GPU, two launches: update and projection over channels, then the rest per token.

The projection walks chunks of CHANNELS channels, all streams of a chunk in one sum; every
GROUPS-th chunk is of the same group; chunks of a group are added in ascending order, then the
groups. With few tokens each chunk has its own program, with many a program walks a group, side by
side with those of the chunks next to its own: same sums, same bits. Updated streams are bf16, so
the product with the fp32 matrix is made of three bf16 products that together are exact. With many
tokens a third launch has the Sinkhorn turns, a thread for each token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4.ops.device import (
    device_reason,
    interpreting,
    launch_options,
    workspace,
)
from dsv4.ops.gemm.activation_triton import row_buffers, row_constants, store_row
from dsv4.ops.kv.entry_triton import append
from dsv4.ops.mhc.sinkhorn_triton import comb_kernel, sinkhorn, sinkhorn4
from dsv4.ops.parts import Parts

CHANNELS = 32
GROUPS = 8
STAGES = 3  # of the walk over a group


@triton.jit
def _dot_exact(v, f, acc, DT: tl.constexpr):
    """`acc + v . f` for `v` `[BM, K]` of dtype DT held in fp32 and fp32 `f` `[K, rows]`."""
    if tl.bfloat16 == DT:
        high = f.to(tl.bfloat16)
        rest = f - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        narrow = v.to(tl.bfloat16)
        acc = tl.dot(narrow, high, acc)
        acc = tl.dot(narrow, middle, acc)
        acc = tl.dot(narrow, low, acc)
    else:
        acc = tl.dot(v, f, acc, input_precision="ieee")
    return acc


@triton.jit
def _made_once(x):
    """bf16 `x`, which the compiler would otherwise make once more, as the product wants it."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
    )


@triton.jit
def _sum_parts(
    values, factor, channel, D: tl.constexpr, PARTS: tl.constexpr, RANGES: tl.constexpr,
    FACTORS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`Parts.total` of one row's channels: PARTS groups of RANGES."""
    total = tl.zeros((BD,), tl.float32)
    for group in tl.static_range(PARTS):
        part = tl.zeros((BD,), tl.float32)
        for index in tl.static_range(RANGES):
            at = (group * RANGES + index) * D + channel
            part += tl.load(values + at, mask=channel < D, other=0.0)
        total += part
    if FACTORS > 0:
        total = total * tl.load(factor + channel // (D // FACTORS), mask=channel < D, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _update_kernel(
    streams, y, factor, post, comb, fn, out, partials, num_tokens,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RPAD: tl.constexpr,
    UPDATE: tl.constexpr, PARTS: tl.constexpr, RANGES: tl.constexpr, FACTORS: tl.constexpr,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, DT: tl.constexpr, ONCE: tl.constexpr
):  # fmt: skip
    """COUNT chunks from `program`: new streams to `out`, the projection to `partials`."""
    part = tl.program_id(0)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    live = token < num_tokens
    rows = tl.arange(0, RPAD)
    row64 = token.to(tl.int64)
    total = tl.zeros((BM, RPAD), tl.float32)
    coefficients = ()
    if UPDATE:
        for k in tl.static_range(N):
            for j in tl.static_range(N):
                m = tl.load(comb + row64 * (N * N) + j * N + k, mask=live, other=0.0)
                coefficients = append(coefficients, m)
            q = tl.load(post + row64 * N + k, mask=live, other=0.0)
            coefficients = append(coefficients, q)
    for chunk in tl.range(part, part + COUNT * STRIDE, STRIDE, num_stages=STAGES):
        channel = chunk * BD + tl.arange(0, BD)
        inside = channel < D
        mask = live[:, None] & inside[None, :]
        at = (row64 * (N * D))[:, None] + channel[None, :]
        acc = tl.zeros((BM, RPAD), tl.float32)
        old = ()
        for j in tl.static_range(N):
            old = append(old, tl.load(streams + at + j * D, mask=mask, other=0.0).to(tl.float32))
        if UPDATE:
            y_at = (row64 * D)[:, None] + channel[None, :]
            if PARTS == 0:
                new_part = tl.load(y + y_at, mask=mask, other=0.0).to(tl.float32)
            else:
                whole = _sum_parts(y, factor, channel, D, PARTS, RANGES, FACTORS, BD)
                new_part = tl.where(mask, whole.to(DT).to(tl.float32)[None, :], 0.0)
        for k in tl.static_range(N):
            f_at = rows[None, :] * (N * D) + k * D + channel[:, None]
            f_mask = inside[:, None] & (rows < ROWS)[None, :]
            f = tl.load(fn + f_at, mask=f_mask, other=0.0)
            v = old[k]
            if UPDATE:
                v = tl.zeros((BM, BD), tl.float32)
                for j in tl.static_range(N):
                    m = coefficients[k * (N + 1) + j]
                    v = tl.fma(old[j], m[:, None].broadcast_to(BM, BD), v)
                q = coefficients[k * (N + 1) + N]
                v = tl.fma(new_part, q[:, None].broadcast_to(BM, BD), v).to(DT)
                if ONCE:
                    v = _made_once(v)
                tl.store(out + at + k * D, v, mask=mask)
                v = v.to(tl.float32)
            acc = _dot_exact(v, f, acc, DT)
        total = total + acc
    at = (part.to(tl.int64) * num_tokens + row64)[:, None] * RPAD + rows[None, :]
    tl.store(partials + at, total, mask=live[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _mix_kernel(
    streams, partials, base, scale, norm, x, post, comb, logits, num_tokens, eps, hc_eps,
    codes, code_scales, row_scale, columns,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    RPAD: tl.constexpr, G: tl.constexpr, MEMBERS: tl.constexpr, ITERS: tl.constexpr,
    HEAD: tl.constexpr, BITS: tl.constexpr, TILED: tl.constexpr, DT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One token: coefficients from the sums of the projection, collapse, norm. BITS 4 or 8: the
    row in few bits as well, as gemm/activation_triton.py has it.

    With a second row of programs the first collapses and the second mixes, side by side. Without
    one, 4 x 4 matrices are left to `comb_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    alone = tl.num_programs(1) == 1
    collapses = alone | (tl.program_id(1) == 0)
    row = tl.arange(0, RPAD)
    channel = tl.arange(0, PAD)
    used = row < ROWS
    shift = tl.load(base + row, mask=used, other=0.0)
    which = (row >= N).to(tl.int32) + (row >= 2 * N).to(tl.int32)
    factor = tl.load(scale + which, mask=used, other=0.0)
    weight = tl.load(norm + channel, mask=channel < D, other=0.0).to(tl.float32)
    held = ()
    squares = tl.zeros((PAD,), tl.float32)
    for j in tl.static_range(N):
        at = (token * N + j) * D + channel
        v = tl.load(streams + at, mask=channel < D, other=0.0).to(tl.float32)
        squares = tl.fma(v, v, squares)
        held = append(held, v.to(DT))
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / (N * D) + eps)
    group = tl.arange(0, G).to(tl.int64)[:, None]
    sums = tl.zeros((G, RPAD), tl.float32)
    for member in tl.static_range(MEMBERS):
        p_at = ((group + member * G) * num_tokens + token) * RPAD + row[None, :]
        sums = sums + tl.load(partials + p_at)
    z = tl.sum(sums, axis=0) * inverse * factor + shift
    gate = 1.0 / (1.0 + tl.exp(-z))
    if collapses:
        mixed = tl.zeros((PAD,), tl.float32)
        for j in tl.static_range(N):
            share = tl.sum(tl.where(row == j, gate + hc_eps, 0.0), axis=0)
            mixed = tl.fma(held[j].to(tl.float32), share, mixed)
        mixed = mixed.to(DT).to(tl.float32)
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) / D + eps) * weight
        tl.store(x + token * D + channel, mixed.to(DT), mask=channel < D)
        if BITS > 0:
            row_value = mixed.to(DT).to(tl.float32)
            store_row(
                row_value, codes, code_scales, row_scale, token, 1, columns, PAD, TILED, BITS == 8
            )
    if (not HEAD) and (alone | (tl.program_id(1) == 1)):
        tl.store(post + token * N + row - N, 2.0 * gate, mask=(row >= N) & (row < 2 * N))
        if N == 4:
            if alone:
                tl.store(logits + token * RPAD + row, z)
            else:
                entries = ()
                for i in tl.static_range(16):
                    entries = append(entries, tl.sum(tl.where(row == 8 + i, z, 0.0)))
                sinkhorn4(entries, comb + token * 16, hc_eps, ITERS, ASM)
        else:
            sinkhorn(z, row, comb + token * (N * N), hc_eps, N, NP, ITERS)


@dataclass(frozen=True)
class Config:
    bm: int  # tokens of a program of the first launch
    split: bool  # a program per chunk, not per group
    num_warps: int
    mix_warps: int


def choose_config(num_tokens: int, size: int) -> Config:
    """Only `mix_warps` sets an order of summation; it depends on the size alone."""
    mix_warps = max(1, min(8, triton.next_power_of_2(size) // 1024))
    if num_tokens <= 64:
        return Config(16, True, 4 if num_tokens == 1 else 2, mix_warps)  # one token has parts
    if num_tokens < 4096:
        return Config(64, num_tokens <= 1024, 4, mix_warps)
    return Config(128, False, 8, mix_warps)


def supports(streams, site, y=None, post=None, comb=None) -> str | None:
    if streams.dtype not in (torch.float32, torch.bfloat16):
        return f"streams are {streams.dtype}, kernels know bfloat16 and float32"
    made = y
    if isinstance(y, Parts):
        made = y.values
        if y.shape[0] > 1:
            return f"{y.shape[0]} rows in parts, kernels add those of one"
    tensors = {"streams": streams, "fn": site.fn, "y": made, "post": post, "comb": comb}
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}, kernels need it contiguous"
    if y is not None and y.dtype != streams.dtype:
        return f"y is {y.dtype}, streams are {streams.dtype}"
    if streams.shape[1] > 8:
        return f"{streams.shape[1]} streams, kernels know up to 8"
    return device_reason(streams.device)


def run(streams, site, y=None, post=None, comb=None, rows=None):
    """`mhc_pre` without `y`; `mhc_head` where the site has one row per stream; or the boundary.
    `rows` (activation_triton.Rows): where the normalised row goes in few bits as well."""
    tokens, n, size = streams.shape
    head = site.fn.shape[0] == n
    update = y is not None
    parts = {"PARTS": 0, "RANGES": 0, "FACTORS": 0}
    factor = None
    if isinstance(y, Parts):
        y, factor = y.values, y.factor
        parts = {"PARTS": y.shape[0], "RANGES": y.shape[1]}
        parts["FACTORS"] = 0 if factor is None else len(factor)
    config = choose_config(tokens, size)
    members = triton.cdiv(triton.cdiv(size, CHANNELS), GROUPS)
    chunks = GROUPS * members if config.split else GROUPS
    rpad = max(16, triton.next_power_of_2(site.fn.shape[0]))
    partials = workspace(streams.device, "mhc_partials", chunks * tokens * rpad, torch.float32)
    new = torch.empty_like(streams) if update else streams
    x = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    options = {"dtype": torch.float32, "device": streams.device}
    new_post = x if head else torch.empty(tokens, n, **options)
    new_comb = x if head else torch.empty(tokens, n, n, **options)
    shape = {"N": n, "D": size, "ROWS": site.fn.shape[0], "RPAD": rpad}
    shape["DT"] = tl.bfloat16 if streams.dtype == torch.bfloat16 else tl.float32
    _update_kernel[(chunks, triton.cdiv(tokens, config.bm))](
        streams,
        y if update else streams,
        site.base if factor is None else factor,
        post if update else partials,
        comb if update else partials,
        site.fn,
        new,
        partials,
        tokens,
        **shape,
        UPDATE=update,
        **parts,
        COUNT=1 if config.split else members,
        STRIDE=GROUPS,
        STAGES=STAGES,
        ONCE=config.bm > 16 and streams.dtype == torch.bfloat16 and not interpreting(),
        BM=config.bm,
        BD=CHANNELS,
        **launch_options(config.num_warps),
    )
    beside = tokens <= 64 and not head
    logits = workspace(streams.device, "mhc_logits", tokens * rpad, torch.float32)
    _mix_kernel[(tokens, 2 if beside else 1)](
        new,
        partials,
        site.base,
        site.scale,
        site.norm,
        x,
        new_post,
        new_comb,
        logits,
        tokens,
        site.eps,
        site.hc_eps,
        *row_buffers(rows, x),
        **shape,
        NP=triton.next_power_of_2(n),
        PAD=triton.next_power_of_2(size),
        G=GROUPS,
        MEMBERS=members if config.split else 1,
        ITERS=site.sinkhorn_iters,
        HEAD=head,
        ASM=not interpreting(),
        **row_constants(rows),
        **launch_options(config.mix_warps),
    )
    if n == 4 and not (head or beside):
        comb_kernel[(triton.cdiv(tokens, 32),)](
            logits, new_comb, tokens, site.hc_eps, RPAD=rpad, ITERS=site.sinkhorn_iters, BM=32,
            ASM=not interpreting(), **launch_options(1),
        )  # fmt: skip
    if head:
        return x
    return (new, x, new_post, new_comb) if update else (x, new_post, new_comb)
