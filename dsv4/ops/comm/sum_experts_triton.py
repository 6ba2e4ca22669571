# mypy: ignore-errors
"""`sum_experts` on a GPU: the last launch of `experts`."""

import torch

from dsv4.ops.core.launch import device_reason
from dsv4.ops.moe.shared_expert_triton import combine


def supports(parts, shared, dtype) -> str | None:
    if dtype != torch.bfloat16 or not (parts.is_contiguous() and shared.is_contiguous()):
        return f"{dtype} of parts with strides {parts.stride()}, kernels write bfloat16"
    return device_reason(parts.device)


def run(parts, shared, dtype):
    y = torch.empty(parts.shape[0], parts.shape[3], dtype=dtype, device=parts.device)
    combine(parts, shared, y, *parts.shape[1:3])
    return y
