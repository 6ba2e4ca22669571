# mypy: ignore-errors
"""`linear` of one row that stores split-K partial sums; the consumer, `mhc_boundary`, reduces them,
so no program waits for the others."""

import torch

from dsv4.ops.core.workspace import workspace
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.a8 import linear_a8_triton
from dsv4.ops.gemm.split_k import PartialSums, split_k
from dsv4.ops.gemm.weights.a8 import A8Fp8


def supports(x, weight) -> str | None:
    if x.shape[0] == 1 and linear_a8_triton.fits_stream(x, weight):
        return None
    formats = linear_triton.NVFP4, linear_triton.FP8
    if x.shape[0] != 1 or linear_triton.weight_format(weight) not in formats:
        return "more rows than one, or neither NVFP4 nor FP8"
    return linear_triton.supports(x, [weight], [torch.float32])


def run(x, weight) -> PartialSums:
    rows, ranges = weight.shape[0], split_k(weight)[0]
    values = workspace(x.device, "linear_partial_sums", ranges * rows, torch.float32)
    values = values[: ranges * rows].view(ranges, 1, rows)
    if isinstance(weight, A8Fp8):
        linear_a8_triton.stream(x, [weight], [values], partial=True)
    else:
        linear_triton.launch(x, [weight], [values], parallel=True, partial=True)
    return PartialSums(values[None], getattr(weight, "global_scale", None), x.dtype)
