"""`linear` of matrices of which some round their rows: those have kernels of their own, the a16
ones of the same call go to linear_triton."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight
from dsv4.ops.gemm import linear_triton

Kind = tuple[int, int]  # scale's columns and bits of an element: such matrices share their rows
KindOf = Callable[[Weight], Kind | None]
Launch = Callable[[Tensor, list[Weight], list[Tensor]], None]


def rows_reason(x: Tensor) -> str | None:
    """Why rows `x` cannot be quantised, or None."""
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(-1) != 1:
        return f"x is {x.dtype} with strides {x.stride()}, kernels read bfloat16 or float32 rows"
    return None


def results_reason(
    x: Tensor, weights: Sequence[Weight], out_dtypes: Sequence[torch.dtype], kind_of: KindOf
) -> str | None:
    """Why the results cannot be written, or why linear_triton does not run the a16 matrices, those
    without a kind."""
    if not set(out_dtypes) <= {torch.bfloat16, torch.float32}:
        return f"results in {out_dtypes}, kernels write bfloat16 and float32"
    others = [i for i, weight in enumerate(weights) if kind_of(weight) is None]
    if not others:
        return None
    dtypes = [out_dtypes[i] for i in others]
    reason: str | None = linear_triton.supports(x, [weights[i] for i in others], dtypes)
    return reason


def run(
    x: Tensor,
    weights: Sequence[Weight],
    out_dtypes: Sequence[torch.dtype],
    kind_of: KindOf,
    launch: Launch,
) -> list[Tensor]:
    """`launch` the matrices of each kind together."""
    outs = [
        torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        for weight, dtype in zip(weights, out_dtypes, strict=True)
    ]
    kinds = [kind_of(weight) for weight in weights]
    for kind in sorted({kind for kind in kinds if kind is not None}):
        chosen = [i for i, found in enumerate(kinds) if found == kind]
        launch(x, [weights[i] for i in chosen], [outs[i] for i in chosen])
    others = [i for i, found in enumerate(kinds) if found is None]
    if others:
        dtypes = [out_dtypes[i] for i in others]
        results = linear_triton.run(x, [weights[i] for i in others], dtypes)
        for i, out in zip(others, results, strict=True):
            outs[i] = out
    return outs
