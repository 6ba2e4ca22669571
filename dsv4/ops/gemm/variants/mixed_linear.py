"""`linear` of matrices of which some round their rows: those have kernels of their own, the a16
ones of the same call go to linear_triton."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight
from dsv4.ops.core.launch import rows_reason
from dsv4.ops.gemm import linear_triton

RowFormat = tuple[int, int]  # a scale's columns, an element's bits: such matrices share rows
KindOf = Callable[[Weight], RowFormat | None]
Launch = Callable[[Tensor, list[Weight], list[Tensor]], None]


def reason(
    x: Tensor, weights: Sequence[Weight], out_dtypes: Sequence[torch.dtype], kind_of: KindOf
) -> str | None:
    """Why rows cannot be quantised or results written, or why linear_triton does not run the a16
    matrices, those without a kind."""
    if (found := rows_reason(x, torch.bfloat16, torch.float32)) is not None:
        return found
    if not set(out_dtypes) <= {torch.bfloat16, torch.float32}:
        return f"results in {out_dtypes}, kernels write bfloat16 and float32"
    others = [i for i, weight in enumerate(weights) if kind_of(weight) is None]
    if not others:
        return None
    dtypes = [out_dtypes[i] for i in others]
    found = linear_triton.supports(x, [weights[i] for i in others], dtypes)
    return found


def run(
    x: Tensor,
    weights: Sequence[Weight],
    out_dtypes: Sequence[torch.dtype],
    kind_of: KindOf,
    launch: Launch,
) -> list[Tensor]:
    """`launch` the matrices of each kind together."""
    outs: list[Tensor] = linear_triton.results(x, weights, out_dtypes)
    kinds = [kind_of(weight) for weight in weights]
    for kind in sorted({kind for kind in kinds if kind is not None}):
        chosen = [i for i, found in enumerate(kinds) if found == kind]
        launch(x, [weights[i] for i in chosen], [outs[i] for i in chosen])
    others = [i for i, found in enumerate(kinds) if found is None]
    linear_triton.fill(x, [weights[i] for i in others], [outs[i] for i in others])
    return outs
