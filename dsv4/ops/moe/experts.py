"""Routed experts and the shared expert: gate and up, clamp, SwiGLU, down, weighted sum.

    g = min(W1 x, limit);  u = clamp(W3 x, -limit, limit);  z = weight * silu(g) * u
    y = sum over chosen experts of W2 round(z)  +  the shared expert (weight 1)

W1 and W3 are stored as one matrix, gate rows first. Products, activation and the sum over experts
are fp32; the sum runs over a token's experts in the given order, the shared expert last, and is
rounded once. A padding row has experts -1 and is skipped; its result is undefined. For a matrix
with `a8` or `a4` activations, its input (x or z) is rounded first, and its result is rounded to the
dtype of `x`, as the publisher's is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from dsv4.formats import fp8
from dsv4.formats.quantized import Fp8BlockTensor, Weight, activations_of
from dsv4.ops.core.batch_invariance import matmul_rows, silu
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape
from dsv4.ops.gemm.linear import dense
from dsv4.ops.gemm.quantize_rows import rounded
from dsv4.ops.gemm.weights.a8 import random_a8, random_a8_fp8
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
    """The input of W2, in the dtype of `x`."""
    gate, up = _product(x, w13).chunk(2, dim=1)
    z = silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
    if weight is not None:
        z.mul_(weight.unsqueeze(1))
    return z.to(x.dtype)


def expert_outer(z: Tensor, w2: Weight) -> Tensor:
    return _product(z, w2)


def _product(x: Tensor, weight: Weight) -> Tensor:
    width = activations_of(weight)
    return as_stored(matmul_rows(rounded(x, width), dense(weight)), width, x.dtype)


def as_stored(product: Tensor, width: str, dtype: torch.dtype) -> Tensor:
    """A product in fp32, for rounded inputs with the numbers that `dtype` has."""
    return product if width == "a16" else product.to(dtype).float()


def experts_reference(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    if isinstance(by.w13, PlacedExperts):
        by.w13.table.visited(experts)
    return sum_pairs(pair_sums(x, experts, weights, by), shared_sums(x, by), x.dtype)


def sum_pairs(expert_sums: Tensor, shared: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `[tokens, chosen, size]` and the shared expert's `[tokens, size]` -> their sum: experts
    in the given order, the shared one last, rounded once."""
    # from zero, so a sum of -0.0 alone is 0.0, as in kernels
    total = torch.zeros_like(shared, dtype=torch.float32)
    for part in expert_sums.unbind(1):
        total = total + part
    return (total + shared).to(dtype)


def pair_sums(x: Tensor, experts: Tensor, weights: Tensor, by: Experts) -> Tensor:
    """fp32 `[tokens, chosen, size]`: each chosen expert's output, zero for negative experts."""
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
    expert_sums = x.new_zeros(len(chosen), x.shape[1], dtype=torch.float32)
    if outputs:
        expert_sums.index_copy_(0, places, torch.cat(outputs))
    return expert_sums.view(*experts.shape, -1)


def shared_sums(x: Tensor, by: Experts) -> Tensor:
    """fp32 `[tokens, size]`: the shared expert's output."""
    if x.shape[0] == 0:
        return x.float()
    return expert_reference(x, by.shared_w13, by.shared_w2, None, by.limit)


def cases() -> Iterable[Case]:
    def plain(tokens: int, size: int, inner: int, count: int, chosen: int, limit: float) -> Case:
        def weights(generator: torch.Generator) -> Experts:
            def matrix(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=generator) * 0.2

            routed = matrix(count, 2 * inner, size), matrix(count, size, inner)
            return Experts(*routed, matrix(2 * inner, size), matrix(size, inner), limit)

        name = f"{tokens}x{size} inner {inner} {chosen} of {count} limit {limit}"
        return _case(name, (tokens, size, count, chosen), weights, (1e-3, 1e-3), torch.float32)

    yield plain(1, 64, 32, 8, 2, 10.0)
    yield plain(17, 48, 16, 4, 4, 0.5)
    yield plain(9, 64, 48, 32, 6, 10.0)
    yield plain(0, 64, 32, 8, 2, 10.0)
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
    yield _a8_case(1, 288, 96)
    yield _a8_case(40, 160, 64)
    yield _a8_case(900, 1024, 512)


def _case(
    name: str,
    sizes: tuple[int, int, int, int],
    weights: Callable[[torch.Generator], Experts],
    tolerance: tuple[float, float],
    dtype: torch.dtype = torch.bfloat16,
    *,
    small: bool = True,
) -> Case:
    """`sizes`: tokens, columns, experts, chosen ones."""
    tokens, size, count, chosen = sizes

    def make(generator: torch.Generator) -> Arguments:
        order = torch.rand(tokens, count, generator=generator).argsort(1)
        return {
            "x": torch.randn(tokens, size, generator=generator).to(dtype),
            "experts": order[:, :chosen].sort(1).values,
            "weights": torch.rand(tokens, chosen, generator=generator),
            "by": weights(generator),
        }

    return Case(name, make, *tolerance, small)


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

    def weights(generator: torch.Generator) -> Experts:
        def matrix(rows: int, columns: int, paired: bool, count: int | None = None) -> Weight:
            if fp8_shared and count is None:
                values = torch.randn(rows, columns, generator=generator) * 0.2
                return Fp8BlockTensor(*fp8.quantize_tiles(values, 32), 32)
            if mx:
                stored = random_mxfp4(rows, columns, generator, count=count)
                return tile_mxfp4(stored, paired=paired)
            return random_tiled(rows, columns, generator, count=count, paired=paired)

        pairs = [
            (matrix(2 * inner, size, True, number), matrix(size, inner, False, number))
            for number in (count, None)
        ]
        return Experts(*pairs[0], *pairs[1], limit)

    name = f"{tokens}x{size} inner {inner} {chosen} of {count} limit {limit} "
    name += ("MXFP4" if mx else "NVFP4") + (", FP8 shared" if fp8_shared else "")
    sizes = (tokens, size, count, chosen)
    return _case(name, sizes, weights, (5e-2, 2e-2), small=inner < 1000)


def _few_bit_case(tokens: int, kinds: tuple[str, str]) -> Case:
    """`kinds` of the routed and the shared experts: see `random_scaled`."""
    size, inner, count, chosen = 288, 96, 4, 2

    def weights(generator: torch.Generator) -> Experts:
        def matrix(rows: int, columns: int, kind: str, count: int, paired: bool) -> Weight:
            if kind == "a16":
                return random_tiled(rows, columns, generator, count=count or None, paired=paired)
            parts = 2 if paired and kind == "nvfp4" else 1
            return random_scaled(rows, columns, generator, kind, count=count, num_parts=parts)

        pairs = [
            (matrix(2 * inner, size, kind, n, True), matrix(size, inner, kind, n, False))
            for kind, n in zip(kinds, (count, 0), strict=True)
        ]
        return Experts(*pairs[0], *pairs[1], 3.0)

    name = f"{tokens}x{size} inner {inner} {chosen} of {count} {kinds} few bits"
    return _case(name, (tokens, size, count, chosen), weights, (0.2, 2e-2), small=tokens < 100)


def _a8_case(tokens: int, size: int, inner: int) -> Case:
    """MXFP4 experts and an FP8 shared one, for a8 rows on sm_90."""
    count, chosen = 4, 2

    def weights(generator: torch.Generator) -> Experts:
        return Experts(
            random_a8(2 * inner, size, generator, count=count, paired=True),
            random_a8(size, inner, generator, count=count),
            random_a8_fp8(2 * inner, size, generator),
            random_a8_fp8(size, inner, generator),
            3.0,
        )

    # The tensor core's error flips the rounding of up to 1 % of the intermediate activations, and
    # each of these is then off by up to an eighth. That moves results by up to a tenth of their
    # deviation, which grows with the root of `inner`; this is about a fifth of it.
    tolerance = inner**0.5 / 8, 2e-2
    name = f"{tokens}x{size} inner {inner} {chosen} of {count} MXFP4 with a8 rows"
    return _case(name, (tokens, size, count, chosen), weights, tolerance, small=tokens < 100)


KERNELS = tuple(
    Kernel(f"dsv4.ops.moe.{name}_triton") for name in ("experts", "experts_scaled", "a8.experts_a8")
)
OP = Op("experts", experts_reference, cases, KERNELS, on_cpu="dsv4.ops.cpu.moe")


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
