# mypy: ignore-errors
"""`experts` with a8 rows on sm_90: FP8 products of MXFP4 experts (gemm/a8/fp8_product_triton.py).

Pairs are sorted by expert and split into tiles, which gather the quantised rows of their tokens.
The first product clamps, activates, weights and rounds to bf16, one launch quantises the result,
and the second writes each pair's row. Rows are summed in the order of a token's experts, the shared
one last. In prompts (gemm/a8/fp8_prompt_experts_gluon.py) each pair has its own copy of its token's
quantised row, next to those of its expert. A single token's experts, after its router, are
experts_a8_stream_gluon.py. Results of both products are bf16, and so are the sums' parts.
"""

from importlib import import_module

import torch

from dsv4.ops.core.launch import a8_reason, rows_reason
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.a8 import linear_a8_triton
from dsv4.ops.gemm.a8.fp8_product_triton import choose_rows, fits_prompts, multiply_experts
from dsv4.ops.gemm.a8.fp8_rows_triton import (
    EARLY_ROWS,
    make_a8_rows,
    make_pair_rows,
    make_token_rows,
)
from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.experts_end_triton import combine
from dsv4.ops.moe.group_by_expert_triton import group_by_expert

WIDE_PAIRS = 24  # from here on programs multiply 128 weight rows: fewer instructions for each
PROMPT_ROWS = 16  # of an expert, on average: from here on fp8_prompt_experts_gluon multiplies


def supports(x, experts, weights, by) -> str | None:
    return experts_triton.choice_reason(experts, weights) or weights_reason(x, by)


def weights_reason(x, by) -> str | None:
    if not (isinstance(by.w13, A8Mxfp4) and isinstance(by.w2, A8Mxfp4)):
        return "the experts do not ask for a8 rows on sm_90"
    if not by.w13.paired or by.w2.paired:
        return "the experts' matrices are tiled for another use"
    reason = rows_reason(x) or experts_triton.separate_reason(by.shared_w13, by.shared_w2)
    return reason or a8_reason(x.device)


def fits_stream(x, by) -> bool:
    """Whether `experts_a8_stream_gluon` runs a single token's experts."""
    if weights_reason(x, by) is not None or x.shape[0] != 1 or not fits_prompts(by.w13, by.w2):
        return False
    return linear_a8_triton.fits_stream(x, by.shared_w13, by.shared_w2) and (
        by.shared_w2.shape[1] == by.w2.columns
    )


def run(x, experts, weights, by, bm=None):
    """`bm`: rows per tile, for tests."""
    sums, extra = partial_sums(x, experts, weights, by, bm=bm)
    y = torch.empty_like(x)
    combine(sums, extra, y, experts.shape[1], early=x.shape[0] <= EARLY_ROWS)
    return y


def partial_sums(x, experts, weights, by, *, with_shared=True, bm=None, gather=None):
    """bf16 `[tokens, chosen, 1, size]` in a workspace, undefined for experts below zero, and the
    shared expert's result, if wanted. `gather`: see `split_experts`."""
    chosen, w13, w2 = experts.shape[1], by.w13, by.w2
    num_pairs, inner, num_experts = experts.numel(), w13.rows // 2, w2.shape[0]
    early = x.shape[0] <= EARLY_ROWS
    z = workspace(x.device, "experts_z", num_pairs * inner, torch.bfloat16)
    z = z[: num_pairs * inner].view(num_pairs, inner)
    sums = workspace(x.device, "a8_partial_sums", num_pairs * w2.rows, torch.bfloat16)
    sums = sums[: num_pairs * w2.rows].view(num_pairs, w2.rows)
    # first: it may quantise its own rows in the same workspace
    extra = _separate_output(x, by) if with_shared else None
    alone = extra is None and with_shared
    if bm is None and num_pairs >= PROMPT_ROWS * num_experts and fits_prompts(w13, w2):
        prompt = import_module("dsv4.ops.gemm.a8.fp8_prompt_experts_gluon")
        tile = prompt.choose_tile(num_pairs, w13, w2)
        grouped = group_by_expert(experts, num_experts, tile.rows)
        rows, pairs = make_token_rows(x, "a8_rows", "a8_pairs", grouped, tile.rows, chosen)
        extra = _shared_output(rows, by) if alone else extra
        prompt.multiply_experts(pairs, w13, z, grouped, tile, weights=weights, limit=by.limit)
        rows = make_pair_rows(z if gather is None else gather(z), "a8_pairs", grouped, tile.rows)
        prompt.multiply_experts(rows, w2, sums, grouped, tile)
    else:
        rows = make_a8_rows(x, "a8_rows")
        extra = _shared_output(rows, by) if alone else extra
        bm = bm or choose_rows(num_pairs / num_experts, most=128)
        grouped = group_by_expert(experts, num_experts, bm, early=early)
        more = {"tiles": 2 if num_pairs >= WIDE_PAIRS and bm <= 32 else 1}
        multiply_experts(
            rows, w13, z, grouped, bm, weights=weights, chosen=chosen, limit=by.limit, **more
        )
        rows = make_a8_rows(z if gather is None else gather(z), "a8_pairs")
        multiply_experts(rows, w2, sums, grouped, bm, **more)
    return sums.view(*experts.shape, 1, w2.rows), extra


def _separate_output(x, by):
    """The shared expert's result if not both of its matrices take a8 rows."""
    w13, w2 = by.shared_w13, by.shared_w2
    if isinstance(w13, A8Fp8) and isinstance(w2, A8Fp8):
        return None
    return experts_triton.separate_output(x, w13, w2, by.limit)


def _shared_output(rows, by):
    """bf16 `[tokens, size]` of the shared expert with a8 rows."""
    count, w13, w2 = rows.num_rows, by.shared_w13, by.shared_w2
    h = torch.empty(count, w13.shape[0], dtype=torch.bfloat16, device=rows.codes.device)
    part = torch.empty(count, w2.shape[0], dtype=torch.bfloat16, device=rows.codes.device)
    linear_a8_triton.multiply(rows, w13, h)
    linear_a8_triton.multiply(make_a8_rows(h, "a8_shared", limit=by.limit), w2, part)
    return part
