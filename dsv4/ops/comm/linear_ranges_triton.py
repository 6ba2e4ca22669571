# mypy: ignore-errors
"""`linear_ranges` on a GPU: the launch of `linear`, each range's partial sum stored apart."""

import torch

from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.linear_triton import NVFP4, launch, weight_format
from dsv4.ops.gemm.split_k import PartialSums, split_k


def supports(x, weight, some) -> str | None:
    reason = linear_triton.supports(x, [weight], [torch.float32])
    if reason is None and split_k(weight)[0] != weight.k_ranges:
        return f"{weight.shape[1]} columns in {weight.k_ranges} ranges, kernels cut at 128 columns"
    return reason


def run(x, weight, some):
    values = torch.empty(
        len(some), x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device
    )
    launch(x, [weight], [values], parallel=True, partial=True, some=some)
    factor = weight.global_scale if weight_format(weight) == NVFP4 else None
    return PartialSums(values[None], factor, x.dtype)
