# mypy: ignore-errors
"""`experts` with low-precision activations (sm_100): the products of gemm/scaled_product_triton.py.

Pairs are sorted by expert and split into tiles. With few tokens a tile gathers the quantised rows
of its tokens; with many, rows are quantised once per pair, contiguous for each tile, so that
descriptors can read them. Gate and up are stored as bf16 in sorted order; one launch clamps,
activates, weights and quantises them, and the down matrix writes each pair's result. Results are
summed in the order of a token's experts, the shared one last. Every matrix uses a single K range,
with few tokens and with many.
"""

import torch

from dsv4.ops.core.launch import native_reason, rows_reason
from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm.quantize_rows_triton import SWIGLU, fill_rows, make_rows
from dsv4.ops.gemm.scaled_product_triton import ScaledConfig, launch_few, launch_many
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.experts_end_triton import combine
from dsv4.ops.moe.group_by_expert_triton import group_by_expert


def choose_config(num_tokens: int, chosen: int, num_experts: int) -> ScaledConfig:
    """Chosen by the rows per expert under even routing; tiles of an expert share its weights."""
    rows = num_tokens * chosen / num_experts
    for most, bn in ((10, 16), (24, 32), (80, 64)):
        if rows <= most:
            return ScaledConfig(bn, 4, 4, True)
    return ScaledConfig(128, 8, 3, False)


def supports(x, experts, weights, by) -> str | None:
    return experts_triton.choice_reason(experts, weights) or weights_reason(x, by)


def weights_reason(x, by) -> str | None:
    if not (isinstance(by.w13, ScaledTensor) and isinstance(by.w2, ScaledTensor)):
        return "the experts do not ask for activations of few bits"
    reason = rows_reason(x) or experts_triton.separate_reason(by.shared_w13, by.shared_w2)
    return reason or native_reason(x.device)


def run(x, experts, weights, by, config=None):
    num_tokens, chosen = experts.shape
    w13, w2 = by.w13, by.w2
    config = config or choose_config(num_tokens, chosen, w2.shape[0])
    num_pairs = experts.numel()
    extra = experts_triton.separate_output(x, by.shared_w13, by.shared_w2, by.limit)
    grouped = group_by_expert(experts, w2.shape[0], config.bn)
    h = workspace(x.device, "experts_h", num_pairs * w13.rows, torch.bfloat16)
    h = h[: num_pairs * w13.rows].view(num_pairs, w13.rows)
    expert_sums = workspace(x.device, "scaled_partial_sums", num_pairs * w2.rows, torch.bfloat16)
    swiglu = {"source": SWIGLU, "weight": weights, "limit": by.limit}
    if config.few:
        rows = _rows(x, num_tokens, w13, config)
        fill_rows(rows, x)
        launch_few(rows, [w13], [h], config, grouped=grouped, chosen=chosen)
        rows = _rows(x, num_pairs, w2, config)
        fill_rows(rows, h, size=w2.columns, grouped=grouped, **swiglu)
        launch_few(rows, [w2], [expert_sums], config, grouped=grouped, to_pairs=True)
    else:
        tiles = {"grouped": grouped, "chosen": chosen, "bm": config.bn}
        rows = _rows(x, grouped.num_tiles * config.bn, w13, config)
        fill_rows(rows, x, **tiles)
        launch_many(rows, w13, h, config, grouped=grouped)
        rows = _rows(x, grouped.num_tiles * config.bn, w2, config)
        fill_rows(rows, h, size=w2.columns, **swiglu, **tiles)
        launch_many(rows, w2, expert_sums, config, grouped=grouped, to_pairs=True)
    y = torch.empty_like(x)
    combine(expert_sums, extra, y, chosen)
    return y


def _rows(x, count, weight, config):
    """Buffers for `count` quantised input rows of `weight`."""
    a8 = weight.group == 32
    return make_rows(x.device, count, weight.columns, tiled=not config.few, a8=a8)
