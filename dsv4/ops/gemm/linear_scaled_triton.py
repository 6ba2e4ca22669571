# mypy: ignore-errors
"""`linear` with low-precision activations (sm_100): rows are quantised, then multiplied.

Matrices of one kind share the quantised rows.
"""

from dsv4.ops.core.gpu import describe
from dsv4.ops.core.launch import native_reason
from dsv4.ops.gemm.quantize_rows_triton import SWIGLU, fill_rows, make_rows
from dsv4.ops.gemm.scaled_product_triton import (
    choose_config,
    launch_few,
    launch_many,
    scaled_split_k,
)
from dsv4.ops.gemm.variants import mixed_linear
from dsv4.ops.gemm.weights.scaled import ScaledTensor

MAX_MATRICES = 8


def supports(x, weights, out_dtypes) -> str | None:
    if not any(map(_kind, weights)):
        return "no weight asks for activations of few bits"
    return native_reason(x.device) or mixed_linear.reason(x, weights, out_dtypes, _kind)


def run(x, weights, out_dtypes):
    return mixed_linear.run(x, weights, out_dtypes, _kind, launch)


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
        x.device, num_rows * num_groups, columns, tiled=not config.few,
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
