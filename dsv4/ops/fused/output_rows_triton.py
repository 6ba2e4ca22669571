# mypy: ignore-errors
"""`grouped_linear` and `linear` of a prompt: the first leaves a8 rows for the second (sm_90)."""

import torch

from dsv4.ops.core.launch import a8_reason, streams
from dsv4.ops.gemm import grouped_linear_triton, linear_triton
from dsv4.ops.gemm.a8 import linear_a8_triton
from dsv4.ops.gemm.a8.fp8_rows_triton import room
from dsv4.ops.gemm.weights.a8 import A8Fp8


def supports(x, wo_a, wo_b) -> str | None:
    if not isinstance(wo_b, A8Fp8) or wo_b.shape[1] % 128:
        return "wo_b does not ask for a8 rows of whole groups"
    reason = a8_reason(x.device) or grouped_linear_triton.supports(x, wo_a)
    if reason is not None:
        return reason
    fmt, _, _, e8m0 = linear_triton.launch_key(wo_a)
    even = x.shape[2] % 128 == 0 and x.data_ptr() % 16 == 0  # what variants/prompt_gluon.py reads
    if not (even and streams(x.device) and linear_triton.expands(x, fmt, e8m0, x.shape[2], None)):
        return "wo_a is not multiplied by the kernel of prompts"
    return None


def run(x, wo_a, wo_b):
    rows = room(x.device, "a8_rows", x.shape[0], wo_a.shape[0])
    linear_triton.launch(x.flatten(1), [wo_a], [rows], num_groups=x.shape[1])
    y = torch.empty(x.shape[0], wo_b.shape[0], dtype=x.dtype, device=x.device)
    linear_a8_triton.multiply(rows, wo_b, y)
    return y
