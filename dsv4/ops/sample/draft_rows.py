"""The rows of a verify step: each sequence's newest token, then its drafts.

A sequence has `1 + drafts` rows, and no more than its limits allow: it never crosses a multiple of
BLOCK (a compressor's open block cannot be rolled back) and never exceeds its longest length. Drafts
end at the first id that is not a token. All limits are computed here, so a step can be queued
before the host knows how many drafts the previous step accepted: `starts` of -1 means the length
that the device holds; NEWEST and DRAFTED stand for ids that the device holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.kv.begin_step import NEWEST

DRAFTED = -3  # the draft that the device holds for this slot and place
BLOCK = 128
MOST_DRAFTS = 7


@dataclass(frozen=True, slots=True)
class SentDrafts:
    """What the host sent for each sequence, and what its slot holds; int64."""

    sent: Tensor  # [sequences, width] newest token and drafts, -1: none; first -1: no sequence
    starts: Tensor  # [sequences] length of the state or -1
    most: Tensor  # [sequences] the longest length allowed after the step
    slots: Tensor  # [sequences]
    newest: Tensor  # [slots] the token sampled last
    lengths: Tensor  # [slots] tokens in the state
    drafts: Tensor  # [slots, MOST_DRAFTS], -1: none
    vocab_size: int  # a draft from here on is no token


@dataclass(frozen=True)
class DraftRows:
    """A ragged batch (`Ragged`), written in place; padding rows and their tokens are -1."""

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    seq_idx: Tensor  # [rows]
    first_rows: Tensor  # [sequences]
    starts: Tensor  # [sequences]
    ends: Tensor  # [sequences]


def draft_rows_reference(given: SentDrafts, out: DraftRows) -> None:
    sent, slots, most = given.sent, given.slots, given.most
    width = sent.shape[1]
    ids = torch.cat((given.newest[slots, None], given.drafts[slots]), dim=1)[:, :width]
    waiting = torch.full_like(sent, DRAFTED)
    waiting[:, 0] = NEWEST
    ids = torch.where(sent == waiting, ids, sent)
    start = torch.where(given.starts < 0, given.lengths[slots], given.starts)
    good = (ids >= 0) & (ids < given.vocab_size)
    good[:, 0] = True
    limits = torch.cumprod(good.long(), 1).sum(1)
    limits = torch.minimum(limits, torch.minimum(BLOCK - start % BLOCK, most - start))
    limits = torch.where(sent[:, 0] == -1, 0, limits.clamp(min=1))
    out.first_rows.copy_(torch.cumsum(limits, 0) - limits)
    out.starts.copy_(torch.where(limits > 0, start, 0))
    out.ends.copy_(torch.where(limits > 0, start + limits, 0))
    out.token_ids.fill_(-1)
    out.positions.fill_(-1)
    out.seq_idx.fill_(sent.shape[0] - 1)
    place = torch.arange(width, device=sent.device)
    real = place < limits[:, None]
    rows = (out.first_rows[:, None] + place)[real]
    out.token_ids[rows] = ids[real]
    out.positions[rows] = (start[:, None] + place)[real]
    sequences = torch.arange(sent.shape[0], device=sent.device)
    out.seq_idx[rows] = sequences[:, None].expand(-1, width)[real]


def cases() -> Iterable[Case]:
    def build(sequences: int, width: int, spare: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def ints(low: int, high: int, *shape: int) -> Tensor:
                return torch.randint(low, high, shape, generator=generator)

            slots = sequences + 2
            sent = torch.where(ints(0, 2, sequences, width) == 1, DRAFTED, ints(-1, 104, 1, width))
            sent[:, 0] = torch.where(ints(0, 3, sequences) > 0, NEWEST, ints(-1, 100, sequences))
            starts = torch.where(ints(0, 2, sequences) == 1, -1, ints(0, 300, sequences))
            drafts = ints(-1, 103, slots, MOST_DRAFTS)
            rows = sequences * width + spare
            given = SentDrafts(
                sent=sent,
                starts=starts,
                most=ints(0, 400, sequences),
                slots=torch.randperm(slots, generator=generator)[:sequences],
                newest=ints(0, 100, slots),
                lengths=ints(0, 300, slots),
                drafts=drafts,
                vocab_size=100,
            )
            rows_and_sequences = (rows,) * 3 + (sequences,) * 3
            return {"given": given, "out": DraftRows(*(ints(0, 9, n) for n in rows_and_sequences))}

        return Case(f"{sequences}x{width}+{spare}", make, 0.0, 0.0)

    yield build(1, 1, 0)
    yield build(1, 6, 0)
    yield build(5, 2, 3)
    yield build(33, 4, 0)
    yield build(7, 8, 70)


OP = Op(
    "draft_rows",
    draft_rows_reference,
    cases,
    kernels=(Kernel("dsv4.ops.sample.draft_rows_triton"),),
    mutates=("out",),
)


def draft_rows(given: SentDrafts, out: DraftRows) -> None:
    """Write the step's rows to `out`, which has room for every row of `given.sent`."""
    sequences, width = given.sent.shape
    check(1 <= width <= MOST_DRAFTS + 1, OP.name, lambda: f"width {width}")
    for name in ("starts", "most", "slots"):
        check_shape(OP.name, name, getattr(given, name), sequences)
    for name in ("first_rows", "starts", "ends"):
        check_shape(OP.name, name, getattr(out, name), sequences)
    check(
        out.positions.shape[0] >= sequences * width,
        OP.name,
        lambda: f"{out.positions.shape[0]} rows for {sequences} sequences of {width}",
    )
    OP(given.sent.device, given=given, out=out)
