# mypy: ignore-errors
"""`grouped_linear` on a GPU: the kernels of `linear`; each group reads its own input columns."""

import torch

from dsv4.ops.gemm import linear_scaled_triton, linear_triton
from dsv4.ops.gemm.weights.scaled import ScaledTensor

GROUP_MULTIPLE = 128


def _kernels(weight):
    return linear_scaled_triton if isinstance(weight, ScaledTensor) else linear_triton


def supports(x, weight) -> str | None:
    if not x.is_contiguous():
        return "x is not contiguous"
    rank = weight.shape[0] // x.shape[1]
    if x.shape[1] > 1 and rank % GROUP_MULTIPLE:
        return f"groups of {rank} rows, kernels need multiples of {GROUP_MULTIPLE}"
    return _kernels(weight).supports(x.flatten(1), [weight], [x.dtype])


def run(x, weight):
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _kernels(weight).launch(x.flatten(1), [weight], [out], num_groups=x.shape[1])
    return out
