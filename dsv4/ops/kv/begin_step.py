"""The start of a step: turns the host's inputs into the model's.

Page tables stay on the device, one row per slot. The host sends only new pages; they are written,
then the rows of the step's sequences are gathered in step order. A token id of NEWEST stands for
the token sampled last in the sequence's slot, which the host may not have seen yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.errors import KernelError
from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape

NEWEST = -2


@dataclass(frozen=True)
class SlotTables:
    """`pages` int64, all tables concatenated: table `i` from `firsts[i]`, `widths[i]` per slot."""

    pages: Tensor
    firsts: tuple[int, ...]
    widths: tuple[int, ...]

    def table(self, index: int, num_slots: int) -> Tensor:
        """`[slots, width]`."""
        first, width = self.firsts[index], self.widths[index]
        return self.pages[first : first + num_slots * width].view(num_slots, width)


@dataclass(frozen=True, slots=True)
class StepStart:
    """What the host sent, what slots hold, and where the model reads; all int64."""

    tables: SlotTables  # written in place
    places: Tensor  # [most new pages] where they belong in `tables.pages`
    pages: Tensor  # [most new pages]
    num_pages: Tensor  # [1] how many of them are new
    sent: Tensor  # [tokens] ids or NEWEST
    seq_idx: Tensor  # [tokens]
    slots: Tensor  # [sequences]
    newest: Tensor  # [slots] the tokens sampled last
    token_ids: Tensor  # [tokens] written in place
    rows: tuple[Tensor, ...]  # of each table [sequences, columns], written in place


def begin_step_reference(step: StepStart) -> None:
    count, slots, sent = int(step.num_pages), step.slots, step.sent
    step.tables.pages[step.places[:count]] = step.pages[:count]
    for index, target in enumerate(step.rows):
        source = step.tables.table(index, step.newest.shape[0])
        target.copy_(source.index_select(0, slots)[:, : target.shape[1]])
    waiting = step.newest[slots[step.seq_idx]]
    step.token_ids.copy_(torch.where(sent == NEWEST, waiting, sent))


def cases() -> Iterable[Case]:
    def build(tokens: int, sequences: int, widths: tuple[int, ...], new: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def ints(high: int, *shape: int) -> Tensor:
                return torch.randint(0, high, shape, generator=generator)

            num_slots = sequences + 3
            firsts = tuple(num_slots * sum(widths[:i]) for i in range(len(widths)))
            size = num_slots * sum(widths)
            step = StepStart(
                tables=SlotTables(ints(10**6, size), firsts, widths),
                places=torch.randperm(size, generator=generator)[: new + 4],
                pages=ints(10**6, new + 4),
                num_pages=torch.tensor([new]),
                sent=torch.where(ints(2, tokens) == 1, NEWEST, ints(1000, tokens) - 1),
                seq_idx=ints(sequences, tokens),
                slots=torch.randperm(num_slots, generator=generator)[:sequences],
                newest=ints(1000, num_slots),
                token_ids=ints(1000, tokens),
                rows=tuple(ints(9, sequences, max(1, width - 2)) for width in widths),
            )
            return {"step": step}

        return Case(f"{tokens} of {sequences} widths {widths} new {new}", make, 0.0, 0.0)

    yield build(1, 1, (4, 1, 3), 0)
    yield build(70, 5, (3, 300, 9), 6)
    yield build(3, 3, (40, 2, 2000), 600)


OP = Op(
    "begin_step",
    begin_step_reference,
    cases,
    kernels=(Kernel("dsv4.ops.kv.begin_step_triton"),),
    mutates=("step.tables", "step.token_ids", "step.rows"),
)


def begin_step(step: StepStart) -> None:
    """Write new pages to their places, then the model's token ids and rows of tables."""
    for name, tensor in (("token_ids", step.token_ids), ("seq_idx", step.seq_idx)):
        check_shape(OP.name, name, tensor, *step.sent.shape)
    sequences = step.slots.shape[0]
    for target, width in zip(step.rows, step.tables.widths, strict=True):
        if target.shape[0] != sequences or target.shape[1] > width:
            found, wanted = tuple(target.shape), f"[{sequences}, up to {width}]"
            raise KernelError(f"{OP.name}: rows have shape {found}, expected {wanted}")
    OP(step.sent.device, step=step)
