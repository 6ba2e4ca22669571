# mypy: ignore-errors
"""`linear` of one row that stores split-K partial sums; the consumer, `mhc_boundary`, reduces them,
so that no program waits for the others."""

import torch

from dsv4.ops.cut import cut_of
from dsv4.ops.device import workspace
from dsv4.ops.gemm import linear_triton
from dsv4.ops.parts import Parts


def supports(x, weight) -> str | None:
    if x.shape[0] != 1 or linear_triton.weight_format(weight) != linear_triton.NVFP4:
        return "more rows than one, or not NVFP4"
    return linear_triton.supports(x, [weight], [torch.float32])


def run(x, weight) -> Parts:
    rows, ranges = weight.shape[0], cut_of(weight)[0]
    values = workspace(x.device, "linear_parts", ranges * rows, torch.float32)
    values = values[: ranges * rows].view(ranges, 1, rows)
    linear_triton.launch(x, [weight], [values], parallel=True, to_parts=True)
    return Parts(values[None], weight.global_scale, x.dtype)
