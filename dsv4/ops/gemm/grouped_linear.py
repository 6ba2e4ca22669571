"""The first output projection: each group of heads has its own rows of one stored matrix.

`u[t, g] = W[g] . x[t, g]`; rows `g * rank .. (g + 1) * rank` of the stored matrix belong to
group `g`. fp32 accumulation; the results of all groups are concatenated. With `a8` or `a4` a
token's input is rounded separately for each group.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight, activations_of
from dsv4.ops.core.batch_invariance import matmul_rows, pad_rows
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.gemm.linear import dense
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.gemm.weights.scaled import random_scaled
from dsv4.ops.gemm.weights.tiled import random_tiled


def grouped_linear_reference(x: Tensor, weight: Weight) -> Tensor:
    num_tokens, num_groups, dtype = x.shape[0], x.shape[1], x.dtype
    rows = dense(weight).view(num_groups, -1, x.shape[2])
    padded = pad_rows(rounded(x, activations_of(weight)).float())
    inputs = padded.transpose(0, 1).contiguous()  # the same layout for any number of groups
    outputs = [matmul_rows(x, matrix) for x, matrix in zip(inputs, rows, strict=True)]
    return torch.cat(outputs, dim=1)[:num_tokens].to(dtype)


def cases() -> Iterable[Case]:
    def build(tokens: int, groups: int, k: int, rank: int, dtype: torch.dtype) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = torch.randn(tokens, groups, k, generator=generator).to(dtype)
            weight = torch.randn(groups * rank, k, generator=generator).to(dtype)
            return {"x": x, "weight": weight}

        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        return Case(f"{tokens}x{groups}x{k} rank {rank} {dtype}", make, tolerance, tolerance)

    for dtype in (torch.float32, torch.bfloat16):
        yield build(3, 2, 64, 16, dtype)
        yield build(9, 4, 31, 5, dtype)
        yield build(0, 2, 64, 16, dtype)

    def tiled(generator: torch.Generator) -> Arguments:
        x = torch.randn(3, 2, 208, generator=generator).bfloat16()
        return {"x": x, "weight": random_tiled(256, 208, generator)}

    yield Case("3x2x208 rank 128 NVFP4", tiled, 2e-2, 2e-2)

    def few_bits(kind: str, rows: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            x = (torch.randn(rows, 2, 288, generator=generator) * 30).bfloat16()
            return {"x": x, "weight": random_scaled(256, 288, generator, kind)}

        return Case(f"{rows}x2x288 rank 128 {kind}, few bits", make, 5e-2, 2e-2, rows < 100)

    yield few_bits("nvfp4", 3)
    yield few_bits("fp8", 2)
    yield few_bits("nvfp4", 140)


KERNELS = (Kernel("dsv4.ops.gemm.grouped_linear_triton"),)
ON_CPU = "dsv4.ops.cpu.products"
OP = Op("grouped_linear", grouped_linear_reference, cases, KERNELS, on_cpu=ON_CPU)


def grouped_linear(x: Tensor, weight: Weight) -> Tensor:
    """`[tokens, groups, k] x [groups * rank, k] -> [tokens, groups * rank]`."""
    check_shape(OP.name, "x", x, "tokens", "groups", "k")
    check(
        weight.shape[1] == x.shape[2] and weight.shape[0] % x.shape[1] == 0,
        OP.name,
        lambda: (
            f"weight has shape {tuple(weight.shape)}, expected "
            f"[a multiple of {x.shape[1]}, {x.shape[2]}]"
        ),
    )
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0])
    return OP(x.device, x=x, weight=weight)
