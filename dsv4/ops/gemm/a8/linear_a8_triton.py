# mypy: ignore-errors
"""`linear` with a8 rows on sm_90: rows are quantised once, then multiplied by each FP8 matrix. With
up to eight rows one launch does both, for all matrices (fp8_stream_gluon.py)."""

from importlib import import_module

import torch

from dsv4.ops.core.launch import a8_reason, streams
from dsv4.ops.gemm.a8.fp8_product_triton import fits_prompts, multiply_rows
from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
from dsv4.ops.gemm.linear_triton import MAX_MATRICES, STREAM_PROGRAMS, STREAM_ROWS
from dsv4.ops.gemm.split_k import split_k
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


def fits_stream(x, *weights) -> bool:
    """Whether `fp8_stream_gluon` multiplies `x`. It copies 16 bytes at a time."""
    few = x.shape[0] <= STREAM_ROWS and x.dtype == torch.bfloat16 and x.stride(0) % 8 == 0
    if not (few and streams(x.device) and x.data_ptr() % 16 == 0):
        return False
    return len(weights) <= MAX_MATRICES and all(map(_streams, weights))


def _streams(weight) -> bool:
    rows, columns = weight.shape
    even = isinstance(weight, A8Fp8) and rows % 64 == columns % 128 == 0
    return even and rows // 64 * split_k(weight)[0] <= STREAM_PROGRAMS


def stream(x, weights, outs, *, partial=False) -> None:
    module = import_module("dsv4.ops.gemm.a8.fp8_stream_gluon")
    module.multiply(x, weights, outs, partial=partial)


def launch(x, weights, outs) -> None:
    """Quantise `x` once and multiply it by each matrix."""
    if fits_stream(x, *weights):
        stream(x, weights, outs)
        return
    rows = make_a8_rows(x, "a8_rows")
    for weight, out in zip(weights, outs, strict=True):
        multiply(rows, weight, out)


def multiply(rows, weight, out) -> None:
    if rows.num_rows >= PROMPT_ROWS and fits_prompts(weight):
        import_module("dsv4.ops.gemm.a8.fp8_prompt_gluon").multiply_rows(rows, weight, out)
    else:
        multiply_rows(rows, weight, out)
