"""What a rank computes of a half-block whose matrices it shares with others.

    linear_ranges   some ranges of K of a matrix, for all rows
    expert_sums     the chosen experts that the rank holds, and the shared one
    split_experts   all chosen experts, of each a range of the inner size and of the rows of W2
    shared_expert   the shared expert alone, for the rows that the rank owns
    combine_experts what these add up to

Added in order, the shares of all ranks have the bits of `linear` and `experts`. On a GPU partial
sums stay as the kernels of these ops leave them: not scaled yet, and by range of K.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.quantized import Weight, activations_of, k_ranges_of
from dsv4.ops.core.op import Case, Kernel, Op, check, check_shape
from dsv4.ops.gemm.linear import range_products
from dsv4.ops.gemm.quantize_rows import rounded, shares_scales
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.moe.experts import (
    Experts,
    expert_inner,
    expert_outer,
    pair_sums,
    shared_sums,
    sum_pairs,
)

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExpertSums:
    """`sums` `[tokens, places, ranges, size]`: one place per chosen expert, undefined where the
    rank does not hold it, then the shared expert's if it is not in `extra`. In fp32, or as kernels
    with rounded rows store them: the same numbers in bf16."""

    sums: Tensor
    extra: Tensor | None  # the shared expert's `[tokens, size]`

    def pairs(self, chosen: int) -> Tensor:
        """fp32 `[tokens, chosen, size]`."""
        return sum_in_order(self.sums[:, :chosen], 2)

    def shared(self) -> Tensor:
        return sum_in_order(self.sums[:, -1], 1) if self.extra is None else self.extra


def sum_in_order(sums: Tensor, dim: int) -> Tensor:
    """Their fp32 sum along `dim`, ascending, from zero: what kernels make of -0.0 alone, too."""
    total = torch.zeros_like(sums.select(dim, 0), dtype=torch.float32)
    for part in sums.unbind(dim):
        total = total + part
    return total


def linear_ranges_reference(x: Tensor, weight: Weight, some: range) -> PartialSums:
    values = range_products(rounded(x, activations_of(weight)).float(), weight, some)
    return PartialSums(values[None], None, x.dtype)


def expert_sums_reference(
    x: Tensor, experts: Tensor, weights: Tensor, by: Experts, with_shared: bool
) -> ExpertSums:
    extra = shared_sums(x, by) if with_shared else None
    return ExpertSums(pair_sums(x, experts, weights, by).unsqueeze(2), extra)


def split_experts_reference(
    x: Tensor, experts: Tensor, weights: Tensor, by: Experts, gather: Gather
) -> Tensor:
    def inner(rows: Tensor, expert: int, places: Tensor) -> Tensor:
        return expert_inner(rows, by.w13[expert], weights.flatten()[places], by.limit)

    def outer(rows: Tensor, expert: int, places: Tensor) -> Tensor:
        return expert_outer(rows, by.w2[expert])

    z = _by_expert(x, experts, inner, x.dtype, by.w13.shape[1] // 2, experts.shape[1])
    sums = _by_expert(gather(z), experts, outer, torch.float32, by.w2.shape[1], 1)
    return sums.view(*experts.shape, 1, -1)


def _by_expert(
    rows: Tensor,
    experts: Tensor,
    product: Callable[[Tensor, int, Tensor], Tensor],
    dtype: torch.dtype,
    width: int,
    pairs_per_row: int,
) -> Tensor:
    """`[pairs, width]`: the product of each pair's row, of all pairs of an expert at once."""
    found = torch.zeros(experts.numel(), width, dtype=dtype, device=rows.device)
    chosen = experts.flatten()
    for expert in sorted({number for number in chosen.tolist() if number >= 0}):
        places = (chosen == expert).nonzero()[:, 0]
        found[places] = product(rows[places // pairs_per_row], expert, places)
    return found


def combine_experts_reference(sums: Tensor, shared: Tensor, dtype: torch.dtype) -> Tensor:
    return sum_pairs(sum_in_order(sums, 2), shared, dtype)


def _no_cases() -> Iterable[Case]:
    """See `SHARES` in dsv4/ops/__init__.py."""
    return ()


def _kernel(name: str) -> tuple[Kernel]:
    return (Kernel(f"dsv4.ops.comm.{name}_triton"),)


LINEAR_RANGES = Op("linear_ranges", linear_ranges_reference, _no_cases, _kernel("linear_ranges"))
EXPERT_SUMS = Op("expert_sums", expert_sums_reference, _no_cases, _kernel("expert_sums"))
SPLIT_EXPERTS = Op("split_experts", split_experts_reference, _no_cases, _kernel("split_experts"))
COMBINE_EXPERTS = Op(
    "combine_experts", combine_experts_reference, _no_cases, _kernel("combine_experts")
)


def linear_ranges(x: Tensor, weight: Weight, some: range) -> PartialSums:
    """The sums of `some` of the weight's ranges of K. `x` has the columns of these alone, so none
    may share a scale with another range (`shares_scales`)."""
    name, total = LINEAR_RANGES.name, k_ranges_of(weight)
    check_shape(name, "x", x, "rows", len(some) * (weight.shape[1] // total))
    check(
        0 <= some.start < some.stop <= total and weight.shape[1] % total == 0,
        name,
        lambda: f"ranges {some} of a weight of {weight.shape[1]} columns in {total} ranges",
    )
    check(
        not shares_scales(activations_of(weight), weight.shape[1] // total),
        name,
        lambda: (
            f"activations {activations_of(weight)} and ranges of {weight.shape[1] // total} "
            "columns: a scale would cover several ranges; expected a16, or a8 and multiples of 128"
        ),
    )
    if x.shape[0] == 0:
        values = x.new_empty(1, len(some), 0, weight.shape[0], dtype=torch.float32)
        return PartialSums(values, None, x.dtype)
    result: PartialSums = LINEAR_RANGES(x.device, x=x, weight=weight, some=some)
    return result


def expert_sums(
    x: Tensor, experts: Tensor, weights: Tensor, by: Experts, with_shared: bool
) -> ExpertSums:
    """`experts` are the rank's own numbers, negative where another rank has the expert; `by` has
    the routed experts of this rank alone."""
    if x.shape[0] == 0:
        empty = torch.zeros(0, experts.shape[1], 1, x.shape[1], device=x.device)
        return ExpertSums(empty, x.float() if with_shared else None)
    result: ExpertSums = EXPERT_SUMS(
        x.device, x=x, experts=experts, weights=weights, by=by, with_shared=with_shared
    )
    return result


def split_experts(
    x: Tensor, experts: Tensor, weights: Tensor, by: Experts, gather: Gather
) -> Tensor:
    """`[tokens, chosen, ranges, own size]`, see `ExpertSums`. `by` has a range of the inner rows of
    each W1 and W3, and a range of the rows of each W2; `gather` brings the columns of all ranks'
    `[pairs, own inner]` together. No sum is cut, so nothing depends on the number of ranks. The
    result lies in a workspace of the experts' ops."""
    if x.shape[0] == 0:
        gather(x.new_empty(0, by.w13.shape[1] // 2))
        return torch.zeros(0, experts.shape[1], 1, by.w2.shape[1], device=x.device)
    result: Tensor = SPLIT_EXPERTS(
        x.device, x=x, experts=experts, weights=weights, by=by, gather=gather
    )
    return result


def combine_experts(sums: Tensor, shared: Tensor, dtype: torch.dtype) -> Tensor:
    """`[tokens, chosen, ranges, size]` and the shared expert's `[tokens, size]` -> their fp32 sum:
    ranges first, then experts in order, the shared one last, rounded once."""
    check_shape(COMBINE_EXPERTS.name, "shared", shared, sums.shape[0], sums.shape[3])
    if sums.shape[0] == 0:
        return shared.to(dtype)
    result: Tensor = COMBINE_EXPERTS(sums.device, sums=sums, shared=shared, dtype=dtype)
    return result


def shared_expert(x: Tensor, by: Experts) -> Tensor:
    """fp32 `[tokens, size]`."""
    if x.shape[0] == 0:
        return x.float()
    shared = by.shared_w13, by.shared_w2
    result: Tensor = SHARED_EXPERT(x.device, x=x, w13=shared[0], w2=shared[1], limit=by.limit)
    return result


def shared_expert_reference(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    return shared_sums(x, Experts(w13, w2, w13, w2, limit))


SHARED_EXPERT = Op("shared_expert", shared_expert_reference, _no_cases, _kernel("shared_expert"))
OPS = (LINEAR_RANGES, EXPERT_SUMS, SPLIT_EXPERTS, SHARED_EXPERT, COMBINE_EXPERTS)
