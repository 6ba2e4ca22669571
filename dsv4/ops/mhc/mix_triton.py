# mypy: ignore-errors
"""mHC on a GPU in two launches: update and projection over channels, then the rest per token.

The first (update_triton.py, in prompts update_prompt_gluon.py) leaves sums of the projection and of
squares, so the second computes its coefficients without reading the streams. With many tokens a
third launch runs the Sinkhorn iterations, one thread per token.
"""

from dataclasses import dataclass
from importlib import import_module

import torch
import triton
import triton.language as tl

from dsv4.ops.core.gpu import Gpu, describe
from dsv4.ops.core.helpers_device import append, depend
from dsv4.ops.core.launch import dependent_options, device_reason, interpreting, launch_options
from dsv4.ops.core.launch import streams as on_hopper
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.mhc.sinkhorn_triton import comb_kernel, sinkhorn
from dsv4.ops.mhc.update_triton import CHANNELS, GROUPS, STAGES, few_update_kernel, update_kernel

BESIDE = 64  # up to this many tokens, matrices have their own programs in the second launch


@triton.jit
def _pick(x, row, INDEX: tl.constexpr):
    """Element INDEX of `x`, as an integer sum, which is one warp instruction."""
    bits = tl.where(row == INDEX, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _load_sums(
    partials, token, num_tokens, row, RPAD: tl.constexpr, G: tl.constexpr, MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sums of the projection, TILE groups at a time: all loads are issued before any addition."""
    group = tl.arange(0, TILE).to(tl.int64)[:, None]
    found = ()
    for first in tl.static_range(0, G, TILE):
        for member in tl.static_range(MEMBERS):
            at = ((group + (first + member * G)) * num_tokens + token) * RPAD + row[None, :]
            found = append(found, tl.load(partials + at))
    return found


@triton.jit
def _logits(
    found, base, scale, row, eps, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    RPAD: tl.constexpr, G: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Coefficient logits `[RPAD]`: members are summed, then groups; the sum is divided by the root
    mean square."""
    used = row < ROWS
    shift = tl.load(base + row, mask=used, other=0.0)
    which = (row >= N).to(tl.int32) + (row >= 2 * N).to(tl.int32)
    factor = tl.load(scale + which, mask=used, other=0.0)
    total = tl.zeros((TILE, RPAD), tl.float32)
    for first in tl.static_range(0, G // TILE):
        sums = tl.zeros((TILE, RPAD), tl.float32)
        for member in tl.static_range(MEMBERS):
            sums = sums + found[first * MEMBERS + member]
        total = total + sums
    sums = tl.sum(total, axis=0)
    inverse = tl.rsqrt(_pick(sums, row, ROWS) / (N * D) + eps)
    return tl.fma(sums, inverse * factor, shift)


@triton.jit
def _store_post(post, gate, row, N: tl.constexpr):
    tl.store(post + row - N, 2.0 * gate, mask=(row >= N) & (row < 2 * N))


@triton.jit(do_not_specialize=["num_tokens"])
def _mix_kernel(
    streams, partials, base, scale, norm, x, post, comb, logits, num_tokens, eps, hc_eps,
    N: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    RPAD: tl.constexpr, G: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr,
    ITERS: tl.constexpr, HEAD: tl.constexpr, BESIDE: tl.constexpr, DT: tl.constexpr,
    ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token: coefficients from the sums of the projection, collapse, norm.

    BESIDE: a second row of programs runs Sinkhorn while the first collapses. Otherwise matrices are
    left to `comb_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, RPAD)
    depend(DEPENDENT)
    found = _load_sums(partials, token, num_tokens, row, RPAD, G, MEMBERS, TILE)
    if (not BESIDE) or tl.program_id(1) == 0:
        channel = tl.arange(0, PAD)
        held = ()
        for j in tl.static_range(N):
            at = (token * N + j) * D + channel
            held = append(held, tl.load(streams + at, mask=channel < D, other=0.0))
        weight = tl.load(norm + channel, mask=channel < D, other=0.0).to(tl.float32)
        tl.debug_barrier()  # otherwise these loads would wait for the sums
        z = _logits(found, base, scale, row, eps, N, D, ROWS, RPAD, G, MEMBERS, TILE)
        gate = 1.0 / (1.0 + tl.exp(-z))
        mixed = tl.zeros((PAD,), tl.float32)
        for j in tl.static_range(N):
            mixed = tl.fma(held[j].to(tl.float32), _pick(gate + hc_eps, row, j), mixed)
        mixed = mixed.to(DT).to(tl.float32)
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) / D + eps) * weight
        tl.store(x + token * D + channel, mixed.to(DT), mask=channel < D)
        if (not BESIDE) and (not HEAD):
            _store_post(post + token * N, gate, row, N)
            tl.store(logits + token * RPAD + row, z)
    else:
        z = _logits(found, base, scale, row, eps, N, D, ROWS, RPAD, G, MEMBERS, TILE)
        _store_post(post + token * N, 1.0 / (1.0 + tl.exp(-z)), row, N)
        entries = ()
        for i in tl.static_range(16):
            entries = append(entries, _pick(z, row, 8 + i))
        sinkhorn(entries, comb + token * 16, hc_eps, ITERS, ASM)


@dataclass(frozen=True)
class MixConfig:
    bm: int  # tokens per program of the first launch
    split: bool  # one program per chunk, not per group
    num_warps: int
    mix_warps: int

    @property
    def groups(self) -> int:
        """Groups that the second launch sums in parallel: a warp per group, a thread per row."""
        return min(GROUPS, self.mix_warps)


def choose_config(num_tokens: int, size: int, gpu: Gpu) -> MixConfig:
    """Only `mix_warps` affects the order of summation; it depends only on the size."""
    mix_warps = max(1, min(8, triton.next_power_of_2(size) // 1024))
    if num_tokens <= 64:
        return MixConfig(16, True, 4, mix_warps)
    if gpu.products == "mma":  # sums of more rows do not fit beside their operands
        return MixConfig(32, num_tokens <= 1024, 4 if num_tokens <= 1024 else 8, mix_warps)
    if num_tokens < 4096:
        return MixConfig(64, num_tokens <= 1024, 4, mix_warps)
    return MixConfig(128, False, 8, mix_warps)


def supports(streams, site, update=None) -> str | None:
    if not site.fn.is_contiguous():
        return f"fn has strides {site.fn.stride()}, kernels need it contiguous"
    return stream_reason(streams, update)


def stream_reason(streams, update) -> str | None:
    if streams.dtype not in (torch.float32, torch.bfloat16):
        return f"streams are {streams.dtype}, kernels know bfloat16 and float32"
    tensors, y = {"streams": streams}, streams
    if update is not None:
        y = made = update.y
        if isinstance(y, PartialSums):
            made = y.values
            if y.shape[0] > 1:
                return f"partial sums of {y.shape[0]} rows; kernels reduce a single row"
        tensors |= {"y": made, "post": update.post, "comb": update.comb}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}, kernels need it contiguous"
    if y.dtype != streams.dtype:
        return f"y is {y.dtype}, streams are {streams.dtype}"
    if streams.shape[1] != 4:
        return f"{streams.shape[1]} streams, kernels know the four of published models"
    return device_reason(streams.device)


def run(streams, site, update=None):
    """`mhc_pre` without `update`; `mhc_head` if the site has one row per stream; otherwise the
    boundary."""
    tokens, n, size = streams.shape
    num_rows = site.fn.shape[0]
    config = choose_config(tokens, size, describe(streams.device))
    members = triton.cdiv(triton.cdiv(size, CHANNELS), GROUPS)
    chunks = GROUPS * members if config.split else GROUPS
    rpad = max(16, triton.next_power_of_2(num_rows + 1))  # plus the sum of squares
    partials = workspace(streams.device, "mhc_partials", chunks * tokens * rpad, torch.float32)
    shape = {"N": n, "D": size, "ROWS": num_rows, "RPAD": rpad}
    shape["DT"] = tl.bfloat16 if streams.dtype == torch.bfloat16 else tl.float32
    new = streams if update is None else torch.empty_like(streams)
    grid = (chunks, triton.cdiv(tokens, config.bm))
    _update(config, grid, shape, members, streams, site, update, new, partials)
    result = _mix(config, shape, members if config.split else 1, new, site, partials)
    return (new, *result) if update is not None and num_rows > n else result


def _update(config, grid, shape, members, streams, site, update, new, partials) -> None:
    y, post, comb, factor = streams, partials, partials, None  # without an update not read
    if update is not None:
        y, post, comb = update.y, update.post, update.comb
    tile = {"PARTIAL_SUMS": 0, "RANGES": 0, "FACTORS": 0, "BM": config.bm, "BD": CHANNELS}
    tile["UPDATE"] = update is not None
    if isinstance(y, PartialSums):
        y, factor = y.values, y.factor
        tile["PARTIAL_SUMS"], tile["RANGES"] = y.shape[:2]
        tile["FACTORS"] = 0 if factor is None else len(factor)
    tokens, narrow = streams.shape[0], streams.dtype == torch.bfloat16
    if tile["UPDATE"] and not config.split and on_hopper(streams.device):
        module = import_module("dsv4.ops.mhc.update_prompt_gluon")
        if module.fits(streams, y, shape["RPAD"]):
            module.launch(streams, y, post, comb, site.fn, new, partials)
            return
    factor = site.base if factor is None else factor
    tensors = (streams, y, factor, post, comb, site.fn, new, partials)
    if config.bm == 16 and narrow:
        few_update_kernel[grid](
            *tensors, tokens, TM=1 if tokens == 1 else 16, ONCE=not interpreting(),
            **shape, **tile, **dependent_options(streams.device, config.num_warps),
        )  # fmt: skip
    else:
        update_kernel[grid](
            *tensors, tokens, COUNT=1 if config.split else members, STRIDE=GROUPS,
            STAGES=1 if config.split else STAGES,
            ONCE=config.bm > 16 and narrow and not interpreting(),
            **shape, **tile, **launch_options(config.num_warps),
        )  # fmt: skip


def _mix(config, shape, members, streams, site, partials):
    tokens, n, size = streams.shape
    head = shape["ROWS"] == n
    beside = tokens <= BESIDE and not head
    x = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    options = {"dtype": torch.float32, "device": streams.device}
    post = x if head else torch.empty(tokens, n, **options)
    comb = x if head else torch.empty(tokens, n, n, **options)
    rpad = shape["RPAD"]
    logits = workspace(streams.device, "mhc_logits", tokens * rpad, torch.float32)
    turns = {"ITERS": site.sinkhorn_iters, "ASM": not interpreting()}
    _mix_kernel[(tokens, 2 if beside else 1)](
        streams, partials, site.base, site.scale, site.norm, x, post, comb, logits, tokens,
        site.eps, site.hc_eps, **shape, PAD=triton.next_power_of_2(size), G=GROUPS,
        MEMBERS=members, TILE=config.groups, BESIDE=beside, HEAD=head, **turns,
        **dependent_options(streams.device, config.mix_warps),
    )  # fmt: skip
    if not (head or beside):
        comb_kernel[(triton.cdiv(tokens, 32),)](
            logits, comb, tokens, site.hc_eps, RPAD=rpad, BM=32, **turns, **launch_options(1)
        )
    return x if head else (x, post, comb)
