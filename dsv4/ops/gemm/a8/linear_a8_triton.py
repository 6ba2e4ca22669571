# mypy: ignore-errors
"""`linear` with a8 rows on sm_90: rows are quantised once, then multiplied by each FP8 matrix."""

from importlib import import_module

from dsv4.ops.core.launch import a8_reason
from dsv4.ops.gemm.a8.fp8_product_triton import fits_prompts, multiply_rows
from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
from dsv4.ops.gemm.variants import mixed_linear
from dsv4.ops.gemm.weights.a8 import A8Fp8

PROMPT_ROWS = 256  # from here on fp8_prompt_gluon multiplies


def supports(x, weights, out_dtypes) -> str | None:
    if not any(map(_kind, weights)):
        return "no weight asks for a8 rows on sm_90"
    return a8_reason(x.device) or mixed_linear.reason(x, weights, out_dtypes, _kind)


def run(x, weights, out_dtypes):
    return mixed_linear.run(x, weights, out_dtypes, _kind, launch)


def _kind(weight) -> tuple[int, int] | None:
    return (128, 8) if isinstance(weight, A8Fp8) else None


def launch(x, weights, outs) -> None:
    """Quantise `x` once and multiply it by each matrix."""
    rows = make_a8_rows(x, "a8_rows")
    for weight, out in zip(weights, outs, strict=True):
        multiply(rows, weight, out)


def multiply(rows, weight, out) -> None:
    if rows.num_rows >= PROMPT_ROWS and fits_prompts(weight):
        import_module("dsv4.ops.gemm.a8.fp8_prompt_gluon").multiply_rows(rows, weight, out)
    else:
        multiply_rows(rows, weight, out)
