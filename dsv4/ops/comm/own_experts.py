"""The numbers of chosen experts among those that a rank holds; -1 for experts of other ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape


def own_experts_reference(experts: Tensor, held: range, load: Tensor | None) -> Tensor:
    if load is not None:
        owners = torch.div(experts[experts >= 0], len(held), rounding_mode="floor")
        counts = torch.bincount(owners, minlength=1)
        load += torch.stack([counts.max(), counts.sum()])
    local = experts - held.start
    return torch.where((local >= 0) & (local < len(held)), local, -1)


def cases() -> Iterable[Case]:
    def build(tokens: int, chosen: int, held: range, *, counted: bool = False) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            experts = torch.randint(-1, 16, (tokens, chosen), generator=generator)
            load = torch.tensor([100, 200]) if counted else None
            return {"experts": experts, "held": held, "load": load}

        name = f"{tokens}x{chosen} of {held}" + (", counted" if counted else "")
        return Case(name, make, 0.0, 0.0)

    yield build(1, 6, range(0, 4))
    yield build(0, 6, range(0, 4))
    yield build(777, 3, range(8, 16))
    yield build(9, 6, range(4, 8), counted=True)


KERNELS = (Kernel("dsv4.ops.comm.own_experts_triton"),)
OP = Op("own_experts", own_experts_reference, cases, KERNELS, mutates=("load",))


def own_experts(experts: Tensor, held: range, load: Tensor | None = None) -> Tensor:
    """`experts` int64 `[tokens, chosen]` -> the same of the rank's own numbers. `load` int64 `[2]`
    counts the pairs of the fullest rank, and of all; every rank holds as many experts."""
    check_shape(OP.name, "experts", experts, "tokens", "chosen")
    found = experts.dtype
    check(found == torch.int64, OP.name, lambda: f"experts are {found}, expected int64")
    result: Tensor = OP(experts.device, experts=experts, held=held, load=load)
    return result
