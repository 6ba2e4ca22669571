"""Routed experts and the shared expert: gate and up, clamp, SwiGLU, down, weighted sum.

    g = min(W1 x, limit);  u = clamp(W3 x, -limit, limit);  z = weight * silu(g) * u
    y = sum over chosen experts of W2 round(z)  +  the shared expert (weight 1)

W1 and W3 are stored as one matrix, gate rows first. Products, activation and the sum over experts
are fp32; the sum runs over a token's experts in the given order, the shared expert last, and is
rounded once. A padding row has experts -1 and is skipped; its result is undefined. For a matrix
with `a8` or `a4` activations, its input (x or z) is rounded first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from dsv4.formats import fp8
from dsv4.formats.quantized import Fp8BlockTensor, Weight, activations_of
from dsv4.ops.core.op import Arguments, Case, CpuForm, Kernel, Op, check_shape
from dsv4.ops.core.rows import matmul_rows, silu
from dsv4.ops.gemm.linear import dense
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.gemm.weights.scaled import random_scaled
from dsv4.ops.gemm.weights.tiled import random_mxfp4, random_tiled, tile_mxfp4
from dsv4.ops.moe.placed import PlacedExperts


@dataclass(frozen=True)
class Experts:
    """The experts of one block; the first axis of `w13` and `w2` is the expert."""

    w13: Weight
    w2: Weight
    shared_w13: Weight
    shared_w2: Weight
    limit: float


def expert_reference(
    x: Tensor, w13: Weight, w2: Weight, weight: Tensor | None, limit: float
) -> Tensor:
    """One expert on `[rows, size]`, fp32 out; `weight` `[rows]` multiplies before W2."""
    return expert_outer(expert_inner(x, w13, weight, limit), w2)


def expert_inner(x: Tensor, w13: Weight, weight: Tensor | None, limit: float) -> Tensor:
    """What W2 reads, in the dtype of `x`."""
    gate, up = matmul_rows(rounded(x, activations_of(w13)), dense(w13)).chunk(2, dim=1)
    z = silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
    if weight is not None:
        z.mul_(weight.unsqueeze(1))
    return z.to(x.dtype)


def expert_outer(z: Tensor, w2: Weight) -> Tensor:
    return matmul_rows(rounded(z, activations_of(w2)), dense(w2))


def experts_reference(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    if isinstance(by.w13, PlacedExperts):
        by.w13.table.visited(experts)
    return sum_pairs(pair_sums(x, experts, weights, by), shared_sums(x, by), x.dtype)


def sum_pairs(parts: Tensor, shared: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `[tokens, chosen, size]` and the shared expert's `[tokens, size]` -> their sum: experts
    in the given order, the shared one last, rounded once."""
    total = torch.zeros_like(shared)  # so a sum of -0.0 alone is 0.0, as kernels have it
    for part in parts.unbind(1):
        total = total + part
    return (total + shared).to(dtype)


def pair_sums(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    """fp32 `[tokens, chosen, size]`: what each chosen expert gave, zero where it is negative."""
    chosen = experts.flatten().tolist()
    visited = (place for place, expert in enumerate(chosen) if expert >= 0)
    by_expert = sorted(visited, key=chosen.__getitem__)  # indices into `chosen`
    places = torch.tensor(by_expert, dtype=torch.int64, device=x.device)
    tokens = torch.div(places, experts.shape[1], rounding_mode="floor")
    rows, row_weights = x.index_select(0, tokens), weights.flatten().index_select(0, places)
    outputs, start = [], 0
    for expert, visits in groupby(by_expert, chosen.__getitem__):
        own = slice(start, start := start + len(list(visits)))
        matrices = by.w13[expert], by.w2[expert]
        outputs.append(expert_reference(rows[own], *matrices, row_weights[own], by.limit))
    parts = x.new_zeros(len(chosen), x.shape[1], dtype=torch.float32)
    if outputs:
        parts.index_copy_(0, places, torch.cat(outputs))
    return parts.view(*experts.shape, -1)


def shared_sums(x: Tensor, by: Experts) -> Tensor:
    """fp32 `[tokens, size]`: what the shared expert gave."""
    if x.shape[0] == 0:
        return x.float()
    return expert_reference(x, by.shared_w13, by.shared_w2, None, by.limit)


def cases() -> Iterable[Case]:
    def build(tokens: int, size: int, inner: int, count: int, chosen: int, limit: float) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            picks = [torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]
            experts = torch.stack(picks).sort(1).values if picks else torch.zeros(0, chosen).long()
            return {
                "x": torch.randn(tokens, size, generator=generator),
                "experts": experts,
                "weights": torch.rand(tokens, chosen, generator=generator),
                "by": Experts(
                    torch.randn(count, 2 * inner, size, generator=generator) * 0.2,
                    torch.randn(count, size, inner, generator=generator) * 0.2,
                    torch.randn(2 * inner, size, generator=generator) * 0.2,
                    torch.randn(size, inner, generator=generator) * 0.2,
                    limit,
                ),
            }

        name = f"{tokens}x{size} inner {inner} {chosen} of {count} limit {limit}"
        return Case(name, make, 1e-3, 1e-3)

    yield build(1, 64, 32, 8, 2, 10.0)
    yield build(17, 48, 16, 4, 4, 0.5)
    yield build(9, 64, 48, 32, 6, 10.0)
    yield build(0, 64, 32, 8, 2, 10.0)
    yield _tiled_case(1, 160, 48, 8, 2, 10.0)
    yield _tiled_case(5, 128, 64, 4, 3, 0.5)
    for tokens in (1, 2):  # K long enough for two ranges in either matrix
        yield _tiled_case(tokens, 1040, 1024, 3, 2, 10.0)
    for tokens in (1, 3):
        yield _tiled_case(tokens, 128, 64, 4, 2, 0.5, fp8_shared=True)
        yield _tiled_case(tokens, 160, 64, 4, 2, 3.0, fp8_shared=True, mx=True)
    yield _tiled_case(1, 1056, 1024, 3, 2, 10.0, mx=True)
    yield _tiled_case(70, 128, 32, 2, 2, 10.0, mx=True)
    yield _few_bit_case(3, ("nvfp4", "nvfp4"))
    yield _few_bit_case(1, ("mxfp4", "fp8"))
    yield _few_bit_case(1, ("nvfp4", "a16"))
    yield _few_bit_case(1, ("a16", "nvfp4"))
    yield _few_bit_case(300, ("nvfp4", "mxfp4"))


def _tiled_case(
    tokens: int,
    size: int,
    inner: int,
    count: int,
    chosen: int,
    limit: float,
    *,
    fp8_shared: bool = False,
    mx: bool = False,
) -> Case:
    """bf16 activations and weights in kernel order; the shared expert may be FP8."""

    def tiled(
        rows: int,
        columns: int,
        generator: torch.Generator,
        paired: bool = False,
        count: int | None = None,
    ) -> Weight:
        if mx:
            return tile_mxfp4(random_mxfp4(rows, columns, generator, count=count), paired=paired)
        return random_tiled(rows, columns, generator, count=count, paired=paired)

    def shared(rows: int, columns: int, generator: torch.Generator, paired: bool) -> Weight:
        if not fp8_shared:
            return tiled(rows, columns, generator, paired)
        values = torch.randn(rows, columns, generator=generator) * 0.2
        return Fp8BlockTensor(*fp8.quantize_tiles(values, 32), 32)

    def make(generator: torch.Generator) -> Arguments:
        picks = [torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]
        return {
            "x": torch.randn(tokens, size, generator=generator).bfloat16(),
            "experts": torch.stack(picks).sort(1).values,
            "weights": torch.rand(tokens, chosen, generator=generator),
            "by": Experts(
                tiled(2 * inner, size, generator, True, count),
                tiled(size, inner, generator, count=count),
                shared(2 * inner, size, generator, True),
                shared(size, inner, generator, False),
                limit,
            ),
        }

    name = f"{tokens}x{size} inner {inner} {chosen} of {count} limit {limit} "
    name += "MXFP4" if mx else "NVFP4"
    name += ", FP8 shared" if fp8_shared else ""
    return Case(name, make, 5e-2, 2e-2, small=inner < 1000)


def _few_bit_case(tokens: int, kinds: tuple[str, str]) -> Case:
    """`kinds` of the routed experts and of the shared one: see `random_scaled`."""
    size, inner, count, chosen = 288, 96, 4, 2

    def pair(kind: str, generator: torch.Generator, count: int) -> tuple[Weight, Weight]:
        if kind == "a16":
            lead = count or None
            return (
                random_tiled(2 * inner, size, generator, count=lead, paired=True),
                random_tiled(size, inner, generator, count=lead),
            )
        parts = 2 if kind == "nvfp4" else 1
        return (
            random_scaled(2 * inner, size, generator, kind, count=count, num_parts=parts),
            random_scaled(size, inner, generator, kind, count=count),
        )

    def make(generator: torch.Generator) -> Arguments:
        picks = [torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]
        routed, shared = (
            pair(kind, generator, n) for kind, n in zip(kinds, (count, 0), strict=True)
        )
        return {
            "x": torch.randn(tokens, size, generator=generator).bfloat16(),
            "experts": torch.stack(picks).sort(1).values,
            "weights": torch.rand(tokens, chosen, generator=generator),
            "by": Experts(*routed, *shared, 3.0),
        }

    name = f"{tokens}x{size} inner {inner} {chosen} of {count} {kinds} few bits"
    return Case(name, make, 0.2, 2e-2, tokens < 100)


KERNELS = (Kernel("dsv4.ops.moe.experts_triton"), Kernel("dsv4.ops.moe.experts_scaled_triton"))
OP = Op("experts", experts_reference, cases, KERNELS, on_cpu=CpuForm("moe", "experts"))


def experts_ffn(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    """`x` `[tokens, size]`, `experts` and `weights` `[tokens, chosen]` -> `[tokens, size]`."""
    size, inner = x.shape[1], by.w2.shape[2]
    check_shape(OP.name, "w13", by.w13, "experts", 2 * inner, size)
    check_shape(OP.name, "w2", by.w2, "experts", size, inner)
    check_shape(OP.name, "shared_w13", by.shared_w13, 2 * by.shared_w2.shape[1], size)
    check_shape(OP.name, "shared_w2", by.shared_w2, size, "inner")
    check_shape(OP.name, "experts", experts, x.shape[0], "chosen")
    check_shape(OP.name, "weights", weights, *experts.shape)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    return OP(x.device, x=x, experts=experts, weights=weights, by=by)
