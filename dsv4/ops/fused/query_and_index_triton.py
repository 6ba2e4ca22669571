# mypy: ignore-errors
"""`query_prepare` and `index_query` in one launch: one program per token and block of heads of
either op; index programs also scale the head weights."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import query_triton
from dsv4.ops.attention.query_triton import FORMATS, HEADS, index_heads, prepare_heads
from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, interpreting

MOST_TOKENS = 128  # beyond this another launch is free, and index heads alone are faster


@triton.jit
def _queries_kernel(
    q, out, index_q, index_out, weights, weights_out, positions, frequencies, eps, scale,
    num_heads, num_index_heads, BH: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first BLOCKS programs of a token handle attention's heads."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    depend(DEPENDENT)
    if block < BLOCKS:
        prepare_heads(
            q, out, positions, frequencies, eps, num_heads, row, block, BH, DIM, ROPE, ASM
        )
    else:
        index_heads(
            index_q, index_out, positions, frequencies, num_index_heads, row, block - BLOCKS,
            BH, INDEX_DIM, ROPE, FORMAT, ASM,
        )  # fmt: skip
        head = (block - BLOCKS) * BH + tl.arange(0, BH)
        at = row.to(tl.int64) * num_index_heads + head
        weight = tl.load(weights + at, mask=head < num_index_heads, other=0.0)
        tl.store(weights_out + at, weight * scale, mask=head < num_index_heads)


def supports(
    queries, index_q, head_weights, scale, positions, frequencies, index_format
) -> str | None:
    q = queries.q
    if q.shape[0] > MOST_TOKENS:
        return "of so many tokens attention prepares its own queries"
    if head_weights.dtype != torch.float32 or not head_weights.is_contiguous():
        return f"weights are {head_weights.dtype} with strides {head_weights.stride()}"
    if q.dtype != index_q.dtype or q.shape[0] == 0:
        return "queries differ in dtype, or there are none"
    turned = (positions, frequencies)
    return query_triton.supports(q, *turned, queries.eps) or query_triton.supports(
        index_q, *turned, index_format=index_format
    )


def run(queries, index_q, head_weights, scale, positions, frequencies, index_format):
    q = queries.q
    out, index_out = torch.empty_like(q), torch.empty_like(index_q)
    weights_out = torch.empty_like(head_weights)
    blocks = triton.cdiv(q.shape[1], HEADS)
    grid = (q.shape[0], blocks + triton.cdiv(index_q.shape[1], HEADS))
    _queries_kernel[grid](
        q, out, index_q, index_out, head_weights, weights_out, positions, frequencies,
        queries.eps, scale, q.shape[1], index_q.shape[1],
        BH=HEADS, BLOCKS=blocks, DIM=q.shape[2], INDEX_DIM=index_q.shape[2],
        ROPE=2 * frequencies.shape[0], FORMAT=FORMATS[index_format], ASM=not interpreting(),
        **dependent_options(q.device, 4),
    )  # fmt: skip
    return replace(queries, q=out, is_prepared=True), index_out, weights_out
