"""How many drafts of each sequence are accepted: those equal to the tokens drawn before them.

Row 0 of a sequence holds its newest token, row i its draft i. If drafts 1 to a equal the tokens
drawn at rows 0 to a - 1, the answer gains the tokens drawn at rows 0 to a; later rows had a wrong
input and are ignored. All in place, so the next step can start without the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape


@dataclass(frozen=True)
class Accepted:
    """int64, written in place."""

    counts: Tensor  # [sequences] tokens of the answer, accepted drafts and one more; 0: no rows
    newest: Tensor  # [slots] the last of them
    lengths: Tensor  # [slots] tokens in the state


def verify_reference(
    tokens: Tensor, inputs: Tensor, first_rows: Tensor, starts: Tensor, ends: Tensor,
    slots: Tensor, width: int, target: Accepted,
) -> None:  # fmt: skip
    place = torch.arange(width, device=tokens.device)
    limits = ends - starts
    rows = (first_rows[:, None] + place).clamp(max=tokens.shape[0] - 1)
    drawn, drafts = tokens[rows], inputs[rows]
    right = (drafts[:, 1:] == drawn[:, :-1]) & (place[1:] < limits[:, None])
    counts = torch.where(limits > 0, 1 + torch.cumprod(right.long(), 1).sum(1), 0)
    target.counts.copy_(counts)
    real = counts > 0
    last = (first_rows + counts - 1)[real]
    target.newest[slots[real]] = tokens[last]
    target.lengths[slots[real]] = (starts + counts)[real]


def cases() -> Iterable[Case]:
    def build(sequences: int, width: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def ints(low: int, high: int, *shape: int) -> Tensor:
                return torch.randint(low, high, shape, generator=generator)

            limits = ints(0, width + 1, sequences)
            starts, slots = ints(0, 50, sequences), sequences + 2
            return {
                "tokens": ints(0, 2, sequences * width),
                "inputs": ints(0, 2, sequences * width),
                "first_rows": torch.cumsum(limits, 0) - limits,
                "starts": starts,
                "ends": starts + limits,
                "slots": torch.randperm(slots, generator=generator)[:sequences],
                "width": width,
                "target": Accepted(ints(0, 9, sequences), ints(0, 9, slots), ints(0, 9, slots)),
            }

        return Case(f"{sequences}x{width}", make, 0.0, 0.0)

    yield build(1, 1)
    yield build(3, 2)
    yield build(40, 6)
    yield build(9, 8)


OP = Op(
    "verify",
    verify_reference,
    cases,
    kernels=(Kernel("dsv4.ops.sample.verify_triton"),),
    mutates=("target",),
)


def verify(
    tokens: Tensor, inputs: Tensor, first_rows: Tensor, starts: Tensor, ends: Tensor,
    slots: Tensor, width: int, target: Accepted,
) -> None:  # fmt: skip
    """`tokens` drawn and `inputs` of all rows; the rest as `draft_rows` writes it, with at
    most `width` rows per sequence."""
    check_shape(OP.name, "inputs", inputs, tokens.shape[0])
    for name, tensor in (("starts", starts), ("ends", ends), ("slots", slots)):
        check_shape(OP.name, name, tensor, first_rows.shape[0])
    check_shape(OP.name, "counts", target.counts, first_rows.shape[0])
    OP(
        tokens.device, tokens=tokens, inputs=inputs, first_rows=first_rows, starts=starts,
        ends=ends, slots=slots, width=width, target=target,
    )  # fmt: skip
