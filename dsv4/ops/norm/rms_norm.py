"""RMS norm over the last axis, with or without a weight.

`g * x / sqrt(mean(x^2) + eps)`: statistic and products in fp32, one rounding to x's dtype.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True).div_(x.shape[-1])
    wide = wide * mean.add_(eps).rsqrt_()
    if weight is not None:
        wide = wide * weight.float()
    return wide.to(x.dtype)


def cases() -> Iterable[Case]:
    def build(rows: int, size: int, weighted: bool, dtype: torch.dtype, scale: float) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = (torch.randn(rows, size, generator=generator) * scale).to(dtype)
            weight = torch.randn(size, generator=generator) if weighted else None
            return {"x": x, "weight": weight, "eps": 1e-6}

        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        name = f"{rows}x{size} {'weighted' if weighted else 'plain'} {dtype} x{scale}"
        return Case(name, make, atol=tolerance, rtol=tolerance, small=rows * size < 100_000)

    for dtype in (torch.float32, torch.bfloat16):
        yield build(3, 64, True, dtype, 1.0)
        yield build(5, 63, False, dtype, 300.0)
        yield build(1, 4096, True, dtype, 1.0)
        yield build(0, 512, True, dtype, 1.0)
        yield build(257, 7168, True, dtype, 1e-4)


KERNELS = (Kernel("dsv4.ops.norm.rms_norm_triton"),)
OP = Op("rms_norm", rms_norm_reference, cases, KERNELS, on_cpu="dsv4.ops.cpu.products")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`[..., size] -> [..., size]`, same dtype."""
    if weight is not None:
        check_shape(OP.name, "weight", weight, x.shape[-1])
    if x.numel() == 0:
        return torch.empty_like(x)
    return OP(x.device, x=x, weight=weight, eps=eps)
