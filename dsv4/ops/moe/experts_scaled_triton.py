# mypy: ignore-errors
"""`experts` with activations of few bits (sm_100): the products of gemm/scaled_triton.py.

Pairs are sorted by expert and cut into tiles; a tile's rows are quantised side by side, once for
each pair, so that a product reads whole tiles. Gate and up come out as fp32 in sorted order, one
launch makes them clamped, activated, weighted and quantised rows, and the down matrix writes each
pair's part. Parts are added in the order of a token's experts, the shared one last. Every matrix
is summed in one range, with few tokens and with many.
"""

import torch

from dsv4.ops.device import native_reason, workspace
from dsv4.ops.gemm.activation_triton import PLAIN, SWIGLU, fill_rows, make_rows
from dsv4.ops.gemm.packed import TiledNvfp4
from dsv4.ops.gemm.scaled import ScaledTensor
from dsv4.ops.gemm.scaled_triton import Config, launch_few, launch_many
from dsv4.ops.moe import experts_triton
from dsv4.ops.moe.route_triton import route
from dsv4.ops.moe.shared_triton import combine, is_apart, shared_part, shared_reason


def choose_config(num_tokens: int, chosen: int, num_experts: int) -> Config:
    """By the rows an expert gets when routing is even; tiles of one expert share its weights."""
    rows = num_tokens * chosen / num_experts
    for most, bn in ((10, 16), (24, 32), (80, 64)):
        if rows <= most:
            return Config(bn, 4, 4, True)
    return Config(128, 8, 3, False)


def supports(x, experts, weights, w13, w2, shared_w13, shared_w2, limit) -> str | None:
    if not (isinstance(w13, ScaledTensor) and isinstance(w2, ScaledTensor)):
        return "the experts do not ask for activations of few bits"
    if x.dtype != torch.bfloat16 or x.stride(-1) != 1:
        return f"x is {x.dtype} with strides {x.stride()}, kernels read bfloat16 rows"
    if experts.dtype != torch.int64 or weights.dtype != torch.float32:
        return f"experts are {experts.dtype}, weights {weights.dtype}; expected int64 and float32"
    if not (experts.is_contiguous() and weights.is_contiguous()):
        return "experts and weights are not contiguous"
    if is_apart(shared_w13):
        reason = shared_reason(shared_w13, shared_w2)
        if reason is not None:
            return reason
    elif not (isinstance(shared_w2, TiledNvfp4) and shared_w13.paired):
        return "the shared expert's matrices are stored in two ways"
    return native_reason(x.device)


def run(x, experts, weights, w13, w2, shared_w13, shared_w2, limit):
    num_tokens, chosen = experts.shape
    config = choose_config(num_tokens, chosen, w2.shape[0])
    return launch(x, experts, weights, w13, w2, shared_w13, shared_w2, limit, config)


def launch(x, experts, weights, w13, w2, shared_w13, shared_w2, limit, config):
    chosen = experts.shape[1]
    extra = _shared(x, shared_w13, shared_w2, limit)
    table = route(experts, w2.shape[0], config.bn)
    h = workspace(x.device, "experts_h", experts.numel() * w13.rows, torch.float32)
    parts = workspace(x.device, "scaled_parts", experts.numel() * w2.rows, torch.float32)
    h = h[: experts.numel() * w13.rows].view(-1, w13.rows)
    for source, weight, inputs, out in ((PLAIN, w13, x, h), (SWIGLU, w2, h, parts)):
        rows = make_rows(
            x.device, table.num_tiles * config.bn, weight.columns, tiled=not config.few,
            name="scaled", a8=weight.group == 32,
        )  # fmt: skip
        own = {"weight": weights, "limit": limit} if source == SWIGLU else {}
        fill_rows(
            rows, inputs, source=source, size=weight.columns, route=table, chosen=chosen,
            bm=config.bn, **own,
        )  # fmt: skip
        options = {"route": table, "to_pairs": source == SWIGLU}
        if config.few:
            launch_few(rows, [weight], [out], config, **options)
        else:
            launch_many(rows, weight, out, config, **options)
    y = torch.empty_like(x)
    combine(parts, extra, y, chosen)
    return y


def _shared(x, w13, w2, limit):
    """fp32 `[tokens, size]`, whatever the shared expert's format."""
    if is_apart(w13):
        return shared_part(x, w13, w2, limit)
    only = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
    stack = [weight.map(lambda value: value[None]) for weight in (w13, w2)]
    ones = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
    parts = experts_triton.launch(x, only, ones, *stack, None, None, limit, parts_only=True)
    return parts.view(x.shape[0], -1)
