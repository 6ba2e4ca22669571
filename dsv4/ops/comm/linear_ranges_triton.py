# mypy: ignore-errors
"""`linear_ranges` on a GPU: the launch of `linear`, each range's partial sum stored apart."""

import torch

from dsv4.ops.core.launch import a8_reason, rows_reason
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.a8.fp8_product_triton import multiply_rows
from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
from dsv4.ops.gemm.linear_triton import NVFP4, launch, weight_format
from dsv4.ops.gemm.split_k import PartialSums, split_k
from dsv4.ops.gemm.weights.a8 import A8Fp8


def supports(x, weight, some) -> str | None:
    if isinstance(weight, A8Fp8):
        reason = rows_reason(x) or a8_reason(x.device)
    else:
        reason = linear_triton.supports(x, [weight], [torch.float32])
    if reason is None and split_k(weight)[0] != weight.k_ranges:
        return f"{weight.shape[1]} columns in {weight.k_ranges} ranges, kernels cut at 128 columns"
    return reason


def run(x, weight, some):
    values = torch.empty(
        len(some), x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device
    )
    factor = None
    if isinstance(weight, A8Fp8):
        multiply_rows(make_a8_rows(x, "a8_rows"), weight, values, some=some)
    else:
        launch(x, [weight], [values], parallel=True, partial=True, some=some)
        factor = weight.global_scale if weight_format(weight) == NVFP4 else None
    return PartialSums(values[None], factor, x.dtype)
