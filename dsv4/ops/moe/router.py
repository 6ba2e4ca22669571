"""Router: which experts a token visits and with what weight.

scores = sqrt(softplus(gate . x)) in fp32. Scored blocks take the largest `score + bias`, ties to
the lower expert; hash blocks take a fixed row of a table by token id. Weights are the scores of
the chosen experts, normalised, times `scaling`. Experts are returned in ascending order, which
fixes the order of the sum over them. A padding row (token id -1) visits none: its experts are -1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.core.batch_invariance import matmul_rows, softplus
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape

LEAST_TOTAL = 1e-30  # scores of a table's experts may all be zero: weights 0, not NaN


@dataclass(frozen=True)
class Gate:
    """A block's router: scored with a selection bias, or with a table of token ids."""

    gate: Tensor  # [experts, size]
    bias: Tensor | None
    table: Tensor | None  # [vocabulary, chosen]
    num_chosen: int
    scaling: float


def router_reference(x: Tensor, token_ids: Tensor, by: Gate) -> tuple[Tensor, Tensor]:
    scores = softplus(matmul_rows(x, by.gate)).sqrt()
    padding = (token_ids < 0).unsqueeze(1)
    if by.table is not None:
        chosen = by.table[token_ids.clamp(min=0)]
    else:
        assert by.bias is not None
        ranked = torch.sort(scores + by.bias.float(), dim=1, descending=True, stable=True).indices
        chosen = ranked[:, : by.num_chosen]
    chosen = chosen.sort(dim=1).values
    weights = scores.gather(1, chosen)
    total = weights.sum(1, keepdim=True) + LEAST_TOTAL
    return chosen.masked_fill(padding, -1), weights / total * by.scaling


def cases() -> Iterable[Case]:
    def build(
        tokens: int,
        size: int,
        experts: int,
        chosen: int,
        hashed: bool,
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            rows = [torch.randperm(experts, generator=generator)[:chosen] for _ in range(20)]
            gate = Gate(
                gate=(torch.randn(experts, size, generator=generator) * 0.1).to(dtype),
                bias=None if hashed else torch.randn(experts, generator=generator),
                table=torch.stack(rows) if hashed else None,
                num_chosen=chosen,
                scaling=1.5,
            )
            return {
                "x": torch.randn(tokens, size, generator=generator).to(dtype),
                "token_ids": torch.randint(0, 20, (tokens,), generator=generator),
                "by": gate,
            }

        name = f"{tokens}x{size} {chosen} of {experts} hashed {hashed} {dtype}"
        return Case(name, make, 1e-4, 1e-4)

    for hashed in (False, True):
        yield build(5, 64, 8, 2, hashed)
        yield build(1, 63, 256, 6, hashed)
        yield build(0, 64, 8, 2, hashed)
        yield build(3, 1040, 48, 6, hashed, torch.bfloat16)
        yield build(70, 128, 24, 3, hashed, torch.bfloat16)


KERNELS = (Kernel("dsv4.ops.moe.router_triton"),)
OP = Op("router", router_reference, cases, KERNELS, on_cpu="dsv4.ops.cpu.moe")


def router(x: Tensor, token_ids: Tensor, by: Gate) -> tuple[Tensor, Tensor]:
    """`x` `[tokens, size]` -> experts `[tokens, chosen]` int64 and weights fp32."""
    bias, table, num_chosen, num_experts = by.bias, by.table, by.num_chosen, by.gate.shape[0]
    check(
        (bias is None) != (table is None),
        OP.name,
        "a block has either a selection bias or a table of token ids",
    )
    check_shape(OP.name, "gate", by.gate, "experts", x.shape[1])
    check_shape(OP.name, "token_ids", token_ids, x.shape[0])
    if bias is not None:
        check(
            bias.shape == (num_experts,) and 0 < num_chosen <= num_experts,
            OP.name,
            lambda: (
                f"bias has shape {tuple(bias.shape)} and {num_chosen} experts are wanted, expected "
                f"({num_experts},) and at most {num_experts}"
            ),
        )
    if table is not None:
        check_shape(OP.name, "table", table, "vocabulary", num_chosen)
    if x.shape[0] == 0:
        return token_ids.new_empty(0, num_chosen), x.new_empty(0, num_chosen, dtype=torch.float32)
    return OP(x.device, x=x, token_ids=token_ids, by=by)
