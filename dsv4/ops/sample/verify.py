"""How many drafts of each sequence are accepted: those equal to the tokens drawn before them.

Row 0 of a sequence holds its newest token, row i its draft i. If drafts 1 to a equal the tokens
drawn at rows 0 to a - 1, the answer gains the tokens drawn at rows 0 to a; later rows had a wrong
input and are ignored. All in place, so the next step and drafts of the model's own blocks can
start without the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape
from dsv4.ops.sample.draft_rows import MOST_DRAFTS

PLACES = MOST_DRAFTS + 2  # of each sequence from its last row on: drafts start there


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The rows of a verify step and the tokens drawn from them, int64. Inputs, first rows, starts
    and ends are as `draft_rows` writes them."""

    tokens: Tensor  # [rows] drawn
    inputs: Tensor  # [rows] newest tokens and drafts
    first_rows: Tensor  # [sequences]
    starts: Tensor  # [sequences]
    ends: Tensor  # [sequences]
    slots: Tensor  # [sequences]
    width: int  # most rows of a sequence
    counts: Tensor  # [sequences] written: accepted drafts and one more token; 0: no rows
    newest: Tensor  # [slots] written: the last of these tokens
    lengths: Tensor  # [slots] written: tokens in the state
    # [3 + PLACES, sequences] written: the last of the rows that count, the slot, the token drawn
    # there, that row's position and those after it. A sequence without rows repeats the first one.
    follows: Tensor


def verify_reference(rows: DrawnRows) -> None:
    tokens, first_rows, starts, slots = rows.tokens, rows.first_rows, rows.starts, rows.slots
    place = torch.arange(rows.width, device=tokens.device)
    limits = rows.ends - starts
    places = (first_rows[:, None] + place).clamp(max=tokens.shape[0] - 1)
    drawn, drafts = tokens[places], rows.inputs[places]
    right = (drafts[:, 1:] == drawn[:, :-1]) & (place[1:] < limits[:, None])
    counts = torch.where(limits > 0, 1 + torch.cumprod(right.long(), 1).sum(1), 0)
    rows.counts.copy_(counts)
    real = counts > 0
    last = (first_rows + counts - 1)[real]
    rows.newest[slots[real]] = tokens[last]
    rows.lengths[slots[real]] = (starts + counts)[real]
    if not len(counts):
        return
    row, position = ((x + counts - 1).clamp(min=0) for x in (first_rows, starts))
    places = position + torch.arange(PLACES, device=tokens.device)[:, None]
    follows = torch.cat((torch.stack((row, slots, tokens[row])), places))
    rows.follows.copy_(torch.where(real, follows, follows[:, :1]))


def cases() -> Iterable[Case]:
    def build(sequences: int, width: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def ints(low: int, high: int, *shape: int) -> Tensor:
                return torch.randint(low, high, shape, generator=generator)

            limits = ints(0, width + 1, sequences)
            starts, slots = ints(0, 50, sequences), sequences + 2
            rows = DrawnRows(
                tokens=ints(0, 2, sequences * width),
                inputs=ints(0, 2, sequences * width),
                first_rows=torch.cumsum(limits, 0) - limits,
                starts=starts,
                ends=starts + limits,
                slots=torch.randperm(slots, generator=generator)[:sequences],
                width=width,
                counts=ints(0, 9, sequences),
                newest=ints(0, 9, slots),
                lengths=ints(0, 9, slots),
                follows=ints(0, 9, 3 + PLACES, sequences),
            )
            return {"rows": rows}

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
    mutates=("rows.counts", "rows.newest", "rows.lengths", "rows.follows"),
)


def verify(rows: DrawnRows) -> None:
    """Count accepted drafts; store the last token and the length of every sequence with rows."""
    check_shape(OP.name, "inputs", rows.inputs, rows.tokens.shape[0])
    for name in ("starts", "ends", "slots", "counts"):
        check_shape(OP.name, name, getattr(rows, name), rows.first_rows.shape[0])
    check_shape(OP.name, "follows", rows.follows, 3 + PLACES, rows.first_rows.shape[0])
    OP(rows.tokens.device, rows=rows)
