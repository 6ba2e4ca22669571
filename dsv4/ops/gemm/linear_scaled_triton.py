# mypy: ignore-errors
"""`linear` with low-precision activations (sm_100): rows are quantised, then multiplied.

Matrices of one kind share the quantised rows; a16 matrices go to linear_triton.
"""

import torch

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.launch import native_reason
from dsv4.ops.gemm import linear_triton
from dsv4.ops.gemm.quantize_rows_triton import SWIGLU, fill_rows, make_rows
from dsv4.ops.gemm.scaled_product_triton import (
    choose_config,
    launch_few,
    launch_many,
    scaled_split_k,
)
from dsv4.ops.gemm.weights.scaled import ScaledTensor

MAX_MATRICES = 8


def supports(x, weights, out_dtypes) -> str | None:
    scaled = [weight for weight in weights if isinstance(weight, ScaledTensor)]
    if not scaled:
        return "no weight asks for activations of few bits"
    reason = rows_reason(x)
    if reason is not None:
        return reason
    if not set(out_dtypes) <= {torch.bfloat16, torch.float32}:
        return f"results in {out_dtypes}, kernels write bfloat16 and float32"
    others = [i for i, weight in enumerate(weights) if not isinstance(weight, ScaledTensor)]
    if not others:
        return None
    return linear_triton.supports(x, [weights[i] for i in others], [out_dtypes[i] for i in others])


def rows_reason(x) -> str | None:
    """Why rows `x` cannot be quantised and multiplied here, or None."""
    if x.dtype not in (torch.bfloat16, torch.float32) or x.stride(-1) != 1:
        return f"x is {x.dtype} with strides {x.stride()}, kernels read bfloat16 or float32 rows"
    return native_reason(x.device)


def run(x, weights, out_dtypes):
    outs = [
        torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        for weight, dtype in zip(weights, out_dtypes, strict=True)
    ]
    kinds = [_kind(weight) for weight in weights]
    for kind in sorted(set(kinds) - {None}):
        chosen = [i for i, found in enumerate(kinds) if found == kind]
        launch(x, [weights[i] for i in chosen], [outs[i] for i in chosen])
    others = [i for i, found in enumerate(kinds) if found is None]
    if others:
        dtypes = [out_dtypes[i] for i in others]
        found = linear_triton.run(x, [weights[i] for i in others], dtypes)
        for i, out in zip(others, found, strict=True):
            outs[i] = out
    return outs


def _kind(weight) -> tuple[int, int] | None:
    """Matrices of the same kind share their quantised rows."""
    return (weight.group, weight.element_bits) if isinstance(weight, ScaledTensor) else None


def launch(x, weights, outs, *, num_groups=1, config=None, limit=None) -> None:
    """Quantise `x` `[rows, groups * k]` once and multiply it by matrices of one kind. With a
    `limit`, `x` is gate and up `[rows, 2 k]`, and their SwiGLU is quantised."""
    num_rows, columns = x.shape[0], weights[0].columns
    most_ranges = max(scaled_split_k(w)[0] for w in weights)
    config = config or choose_config(num_rows, most_ranges, describe(x.device))
    rows = make_rows(
        x.device, num_rows * num_groups, columns, tiled=not config.few, name="scaled",
        fold=num_groups, a8=weights[0].group == 32,
    )  # fmt: skip
    if limit is None:
        fill_rows(rows, x.reshape(num_rows * num_groups, columns) if num_groups > 1 else x)
    else:
        fill_rows(rows, x, source=SWIGLU, limit=limit, size=columns)
    if not config.few:
        for weight, out in zip(weights, outs, strict=True):
            launch_many(rows, weight, out, config)
        return
    for start in range(0, len(weights), MAX_MATRICES):
        part = slice(start, start + MAX_MATRICES)
        launch_few(rows, weights[part], outs[part], config)
