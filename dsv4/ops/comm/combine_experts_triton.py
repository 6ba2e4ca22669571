# mypy: ignore-errors
"""`combine_experts` on a GPU: the last launch of `experts`."""

import torch

from dsv4.ops.core.launch import device_reason
from dsv4.ops.moe.experts_end_triton import combine


def supports(sums, shared, dtype) -> str | None:
    if dtype != torch.bfloat16 or not (sums.is_contiguous() and shared.is_contiguous()):
        return f"{dtype} of sums with strides {sums.stride()}, kernels write bfloat16"
    return device_reason(sums.device)


def run(sums, shared, dtype):
    y = torch.empty(sums.shape[0], sums.shape[3], dtype=dtype, device=sums.device)
    combine(sums, shared, y, *sums.shape[1:3])
    return y
