# mypy: ignore-errors
"""`mhc_update` on a GPU: only the update of `mhc_boundary`, with the same instructions. Used at the
end of a pipeline stage, where the next site is on another rank."""

import torch
import triton
import triton.language as tl

from dsv4.ops.core.launch import launch_options
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.mhc import mix_triton
from dsv4.ops.mhc.update_triton import coefficients_of, new_row, new_stream, old_streams

ROWS, CHANNELS = 8, 256


@triton.jit(do_not_specialize=["num_tokens"])
def _stage_end_kernel(
    streams, y, factor, post, comb, out, num_tokens,
    N: tl.constexpr, D: tl.constexpr, PARTIAL_SUMS: tl.constexpr, RANGES: tl.constexpr,
    FACTORS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    live = token < num_tokens
    row64 = token.to(tl.int64)
    channel = tl.program_id(0) * BD + tl.arange(0, BD)
    mask = live[:, None] & (channel < D)[None, :]
    at = (row64 * (N * D))[:, None] + channel[None, :]
    old = old_streams(streams, at, mask, N, D)
    new = new_row(y, factor, row64, channel, mask, D, PARTIAL_SUMS, RANGES, FACTORS, BD, DT)
    coefficients = coefficients_of(post, comb, row64, live, N)
    for k in tl.static_range(N):
        v = new_stream(old, new, coefficients, k, N, BM, BD).to(DT)
        tl.store(out + at + k * D, v, mask=mask)


def supports(streams, update) -> str | None:
    return mix_triton.stream_reason(streams, update)


def run(streams, update):
    y, post, comb = update.y, update.post, update.comb
    tokens, n, size = streams.shape
    out, factor = torch.empty_like(streams), post
    sums = {"PARTIAL_SUMS": 0, "RANGES": 0, "FACTORS": 0}
    if isinstance(y, PartialSums):
        factor = post if y.factor is None else y.factor
        sums["FACTORS"] = 0 if y.factor is None else len(y.factor)
        y = y.values
        sums["PARTIAL_SUMS"], sums["RANGES"] = y.shape[:2]
    rows = 1 if tokens == 1 else ROWS
    _stage_end_kernel[(triton.cdiv(size, CHANNELS), triton.cdiv(tokens, rows))](
        streams, y, factor, post, comb, out, tokens, N=n, D=size, BM=rows, BD=CHANNELS,
        DT=tl.bfloat16 if streams.dtype == torch.bfloat16 else tl.float32, **sums,
        **launch_options(4),
    )  # fmt: skip
    return out
