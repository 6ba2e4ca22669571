# mypy: ignore-errors
"""`linear` of one row that stores split-K partial sums; the consumer, `mhc_boundary`, reduces them,
so no program waits for the others."""

import torch

from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.split_k import PartialSums, split_k


def supports(x, weight) -> str | None:
    if x.shape[0] != 1 or linear_triton.weight_format(weight) != linear_triton.NVFP4:
        return "more rows than one, or not NVFP4"
    return linear_triton.supports(x, [weight], [torch.float32])


def run(x, weight) -> PartialSums:
    rows, ranges = weight.shape[0], split_k(weight)[0]
    values = workspace(x.device, "linear_partial_sums", ranges * rows, torch.float32)
    values = values[: ranges * rows].view(ranges, 1, rows)
    linear_triton.launch(x, [weight], [values], parallel=True, partial=True)
    return PartialSums(values[None], weight.global_scale, x.dtype)
