# mypy: ignore-errors
"""The end of `experts`: runs a shared expert in another format as two linear ops with an activation
in between, and adds the partial sums of all experts."""

import torch
import triton
import triton.language as tl

from dsv4.formats.quantized import activations_of
from dsv4.ops.core.helpers_device import depend, swiglu
from dsv4.ops.core.launch import a8_reason, dependent_options, launch_options, native_reason
from dsv4.ops.gemm import linear_scaled_triton, linear_triton
from dsv4.ops.gemm.a8 import linear_a8_triton
from dsv4.ops.gemm.weights.a8 import A8Fp8
from dsv4.ops.gemm.weights.scaled import ScaledTensor
from dsv4.ops.gemm.weights.tiled import TiledFp4
from dsv4.ops.moe.placed import stack_of


@triton.jit
def _activate_kernel(h, z, inner, limit, BN: tl.constexpr):
    """SwiGLU of a shared expert in another format: gate and up are concatenated."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64)
    live = column < inner
    gate = tl.load(h + row * (2 * inner) + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(h + row * (2 * inner) + inner + column, mask=live, other=0.0).to(tl.float32)
    tl.store(z + row * inner + column, swiglu(gate, up, limit).to(tl.bfloat16), mask=live)


def is_separate(by) -> bool:
    """Whether the shared expert has another format and runs as two linear ops."""
    shared = by.shared_w13
    return not isinstance(shared, TiledFp4) or type(shared) is not type(stack_of(by.w13))


def shared_reason(w13, w2) -> str | None:
    """Why a shared expert in another format is not supported, or None."""
    for weight in (w13, w2):
        if isinstance(weight, ScaledTensor):
            reason = native_reason(weight.device)
        elif isinstance(weight, A8Fp8):
            reason = a8_reason(weight.device)
        else:
            found = linear_triton.weight_format(weight)
            reason = found if isinstance(found, str) else None
        if reason is not None:
            return f"the shared expert: {reason}"
    return None


def _multiply(x, weight, out) -> None:
    if isinstance(weight, ScaledTensor):
        linear_scaled_triton.launch(x, [weight], [out])
    elif isinstance(weight, A8Fp8):
        linear_a8_triton.launch(x, [weight], [out])
    else:
        linear_triton.launch(x, [weight], [out])


def _dtype_of(weight) -> torch.dtype:
    """Of a product."""
    return torch.float32 if activations_of(weight) == "a16" else torch.bfloat16


def shared_output(x, w13, w2, limit):
    """`[tokens, size]` of a shared expert in FP8 or bf16, fp32; or with low-precision activations,
    bf16."""
    tokens, inner = x.shape[0], w2.shape[1]
    h = torch.empty(tokens, 2 * inner, dtype=_dtype_of(w13), device=x.device)
    part = torch.empty(tokens, w2.shape[0], dtype=_dtype_of(w2), device=x.device)
    _multiply(x, w13, h)
    if isinstance(w2, ScaledTensor):
        linear_scaled_triton.launch(h, [w2], [part], limit=limit)
        return part
    z = torch.empty(tokens, inner, dtype=torch.bfloat16, device=x.device)
    grid = (triton.cdiv(inner, 1024), tokens)
    _activate_kernel[grid](h, z, inner, limit, BN=1024, **launch_options(4))
    _multiply(z, w2, part)
    return part


@triton.jit
def _combine_kernel(
    partial_sums, extra, y, size, PLACES: tl.constexpr, RANGES: tl.constexpr, EXTRA: tl.constexpr,
    BN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """EXTRA: the shared expert's result is in its own buffer and is added last."""
    depend(DEPENDENT)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BN,), dtype=tl.float32)
    for place in tl.static_range(PLACES):
        part = tl.zeros((BN,), dtype=tl.float32)
        for index in tl.static_range(RANGES):
            at = ((row * PLACES + place) * RANGES + index) * size + column
            part += tl.load(partial_sums + at, mask=column < size, other=0.0)
        total += part
    if EXTRA:
        total += tl.load(extra + row * size + column, mask=column < size, other=0.0)
    tl.store(y + row * size + column, total.to(tl.bfloat16), mask=column < size)


def combine(expert_sums, extra, y, places, ranges=1, *, early=False) -> None:
    """Add `expert_sums` `[tokens, places, ranges, size]` and the separate result into `y`, in fp32.
    `early`: the launch may start before the previous one is complete."""
    tokens, size = y.shape
    _combine_kernel[(triton.cdiv(size, 1024), tokens)](
        expert_sums, expert_sums if extra is None else extra, y, size,
        PLACES=places, RANGES=ranges, EXTRA=extra is not None, BN=1024, 
        **dependent_options(y.device, 4, early=early),
    )  # fmt: skip
