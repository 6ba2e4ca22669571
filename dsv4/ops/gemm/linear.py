"""Several matrices applied to one input: `y_i = x . W_i^T`, fp32 accumulation.

The matrices of one call may have different formats and result dtypes; a kernel reads `x` once for
all of them. A row's result does not depend on the other rows. For a matrix with `a8` or `a4`
activations the input is rounded first (`quantize_rows.py`). If a matrix sets ranges of K
(`k_ranges`), each range is summed separately and ranges are added in ascending order.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsv4.formats import fp8
from dsv4.formats.quantized import Fp8BlockTensor, Weight, activations_of, k_ranges_of
from dsv4.formats.spec import E4M3_MAX
from dsv4.ops.core.batch_invariance import matmul_rows, pad_rows
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.gemm.weights.a8 import RANDOM_SIZE, SUM_ERROR, random_a8_fp8
from dsv4.ops.gemm.weights.scaled import random_scaled
from dsv4.ops.gemm.weights.tiled import random_tiled


def dense(weight: Weight) -> Tensor:
    """A weight of any format in fp32."""
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def linear_reference(
    x: Tensor, weights: Sequence[Weight], out_dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Matrices with the same activation width share one rounding of x."""
    num_rows, inputs = x.shape[0], {}
    for width in map(activations_of, weights):
        if width not in inputs:
            inputs[width] = pad_rows(rounded(x, width).float())
    return [
        _product(inputs[activations_of(weight)], weight, dtype)[:num_rows]
        for weight, dtype in zip(weights, out_dtypes, strict=True)
    ]


def _product(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    ranges = k_ranges_of(weight)
    if ranges == 1:
        return matmul_rows(x, dense(weight)).to(dtype)
    return PartialSums(range_products(x, weight, range(ranges))[None], None, dtype).total()


def range_products(x: Tensor, weight: Weight, ranges: range) -> Tensor:
    """fp32 `[ranges, rows, n]`: x times some of the weight's ranges of K; x begins at the columns
    of the first of `ranges`."""
    values, width = dense(weight), weight.shape[1] // k_ranges_of(weight)
    products = []
    for place, number in enumerate(ranges):
        own = x[:, place * width : (place + 1) * width].contiguous()
        products.append(matmul_rows(own, values[:, number * width : (number + 1) * width]))
    return torch.stack(products)


def cases() -> Iterable[Case]:
    def build(rows: int, k: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = torch.randn(rows, k, generator=generator).to(dtype)
            weights = [torch.randn(n, k, generator=generator).to(dtype) for n in sizes]
            return {"x": x, "weights": weights, "out_dtypes": [dtype] * len(sizes)}

        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        small = rows * k * sum(sizes) < 10**7
        return Case(f"{rows}x{k} to {sizes} {dtype}", make, tolerance, tolerance, small)

    for dtype in (torch.float32, torch.bfloat16):
        yield build(1, 64, (96,), dtype)
        yield build(5, 63, (33, 7), dtype)
        yield build(0, 64, (16,), dtype)
        yield build(33, 256, (24, 128, 1), dtype)
    yield from _stored_cases()
    yield from _few_bit_cases()


def _stored_cases() -> Iterable[Case]:
    """Weights as kernels read them: tiled NVFP4, FP8 tiles and bf16 in one call."""

    def build(rows: int, k: int, sizes: tuple[int, ...], block: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = torch.randn(rows, k, generator=generator).bfloat16()
            weights: list[Weight] = [random_tiled(n, k, generator) for n in sizes]
            values = torch.randn(sizes[0], k, generator=generator)
            tiles, scale = fp8.quantize_tiles(values, block, power_of_two=block == 32)
            weights += [Fp8BlockTensor(tiles, scale, block), values.bfloat16()]
            if k % 32 == 0:  # one scale per row, one per 32 of its columns
                weights += [_row_scaled(values, k), _row_scaled(values, 32)]
            dtypes = [torch.bfloat16, torch.float32] * len(weights)
            return {"x": x, "weights": weights, "out_dtypes": dtypes[: len(weights)]}

        return Case(f"{rows}x{k} to {sizes} NVFP4, FP8 {block}, bf16", make, 2e-2, 2e-2)

    yield build(1, 256, (96,), 32)
    yield build(5, 208, (33, 70), 128)
    yield build(17, 1040, (128, 7, 64), 32)
    yield build(0, 128, (64,), 128)


def _row_scaled(values: Tensor, block: int) -> Fp8BlockTensor:
    scale = values.reshape(values.shape[0], -1, block).abs().amax(-1) / E4M3_MAX
    data = fp8.encode(values / scale.repeat_interleave(block, dim=-1))
    return Fp8BlockTensor(data, scale, block, 1)


def _few_bit_cases() -> Iterable[Case]:
    """Weights for block-scaled tensor cores, with their activation widths."""

    def build(rows: int, k: int, kinds: tuple[str, ...], sizes: tuple[int, ...]) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = (torch.randn(rows, k, generator=generator) * 30).bfloat16()
            pairs = list(zip(kinds, sizes, strict=True))
            weights: list[Weight] = [random_scaled(n, k, generator, kind) for kind, n in pairs]
            weights.append(torch.randn(24, k, generator=generator).bfloat16())
            dtypes = [torch.bfloat16, torch.float32] * len(weights)
            return {"x": x, "weights": weights, "out_dtypes": dtypes[: len(weights)]}

        return Case(f"{rows}x{k} to {sizes} {kinds} few bits", make, 5e-2, 2e-2, rows < 100)

    yield build(1, 288, ("nvfp4",), (200,))
    yield build(5, 2048, ("nvfp4", "nvfp4", "mxfp4", "fp8"), (130, 7, 64, 40))
    yield build(130, 1024, ("nvfp4", "mxfp4"), (128, 130))
    yield build(600, 512, ("nvfp4", "fp8"), (256, 64))
    yield _a8_case(1, 1536, (200, 64))
    yield _a8_case(18, 288, (72,))
    yield _a8_case(600, 1024, (256, 128))


def _a8_case(rows: int, k: int, sizes: tuple[int, ...]) -> Case:
    """FP8 weights for a8 rows on sm_90, beside one that reads the row unrounded."""

    def make(generator: torch.Generator) -> Arguments:
        x = (torch.randn(rows, k, generator=generator) * 30).bfloat16()
        weights: list[Weight] = [random_a8_fp8(n, k, generator) for n in sizes]
        weights.append(torch.randn(24, k, generator=generator).bfloat16())
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
        return {"x": x, "weights": weights, "out_dtypes": dtypes[: len(weights)]}

    magnitudes = k * (30 * 0.8) * (RANDOM_SIZE * 0.8)  # 0.8: mean of |normal|
    name = f"{rows}x{k} to {sizes} FP8 with a8 rows"
    # a bf16 result whose rounding turns is off by up to 2^-7
    return Case(name, make, SUM_ERROR * magnitudes, 2**-7, rows < 100)


KERNELS = tuple(
    Kernel(f"dsv4.ops.gemm.{name}_triton") for name in ("linear", "linear_scaled", "a8.linear_a8")
)
OP = Op("linear", linear_reference, cases, KERNELS, on_cpu="dsv4.ops.cpu.products")


def linear_multi(
    x: Tensor, weights: Sequence[Weight], out_dtypes: Sequence[torch.dtype] | None = None
) -> list[Tensor]:
    """`[rows, k]` and matrices `[n_i, k]` -> `[rows, n_i]` each, by default in x's dtype."""
    dtypes = list(out_dtypes) if out_dtypes is not None else [x.dtype] * len(weights)
    check(x.dim() == 2, OP.name, lambda: f"x has shape {tuple(x.shape)}, expected [rows, k]")
    check(
        len(dtypes) == len(weights),
        OP.name,
        lambda: f"{len(dtypes)} result dtypes for {len(weights)} matrices",
    )
    k, device = x.shape[1], x.device
    check(
        all(len(weight.shape) == 2 and weight.shape[1] == k for weight in weights),
        OP.name,
        lambda: f"weights have shapes {[tuple(w.shape) for w in weights]}, expected [n, {k}]",
    )
    check(
        all(weight.device == device for weight in weights),
        OP.name,
        lambda: f"weights are on {[str(w.device) for w in weights]}, x on {device}",
    )
    if x.shape[0] == 0:
        return [
            x.new_empty(0, w.shape[0], dtype=dtype)
            for w, dtype in zip(weights, dtypes, strict=True)
        ]
    return OP(x.device, x=x, weights=weights, out_dtypes=dtypes)


def linear(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """One matrix: `[rows, k] x [n, k] -> [rows, n]`."""
    return linear_multi(x, [weight], None if out_dtype is None else [out_dtype])[0]
