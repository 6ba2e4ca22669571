# mypy: ignore-errors
"""`linear` with a8 rows on sm_90: rows are quantised once, then multiplied by each FP8 matrix.

a16 matrices of the same call go to linear_triton.
"""

import torch

from dsv4.ops.core.launch import a8_reason
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.a8.fp8_product_triton import multiply_rows
from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
from dsv4.ops.gemm.weights.a8 import A8Fp8


def supports(x, weights, out_dtypes) -> str | None:
    if not any(isinstance(weight, A8Fp8) for weight in weights):
        return "no weight asks for a8 rows on sm_90"
    reason = rows_reason(x)
    if reason is not None:
        return reason
    if not set(out_dtypes) <= {torch.bfloat16, torch.float32}:
        return f"results in {out_dtypes}, kernels write bfloat16 and float32"
    others = [i for i, weight in enumerate(weights) if not isinstance(weight, A8Fp8)]
    if not others:
        return None
    return linear_triton.supports(x, [weights[i] for i in others], [out_dtypes[i] for i in others])


def rows_reason(x) -> str | None:
    """Why rows `x` cannot be quantised and multiplied here, or None."""
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(-1) != 1:
        return f"x is {x.dtype} with strides {x.stride()}, kernels read bfloat16 or float32 rows"
    return a8_reason(x.device)


def run(x, weights, out_dtypes):
    outs = [
        torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        for weight, dtype in zip(weights, out_dtypes, strict=True)
    ]
    rounded = [i for i, weight in enumerate(weights) if isinstance(weight, A8Fp8)]
    launch(x, [weights[i] for i in rounded], [outs[i] for i in rounded])
    others = [i for i in range(len(weights)) if i not in rounded]
    if others:
        dtypes = [out_dtypes[i] for i in others]
        found = linear_triton.run(x, [weights[i] for i in others], dtypes)
        for i, out in zip(others, found, strict=True):
            outs[i] = out
    return outs


def launch(x, weights, outs) -> None:
    """Quantise `x` once and multiply it by each matrix."""
    rows = make_a8_rows(x, "a8_rows")
    for weight, out in zip(weights, outs, strict=True):
        multiply_rows(rows, weight, out)
