"""Drafts by a block of the checkpoint itself, in the same parts as a step.

After each step `keys` stores the block's keys of the step's tokens, since it attends to its own;
then `tokens` makes the drafts of all sequences, one row each and one pass for each draft. They are
drawn with the noise that the target will use for the same token: where the block's distribution is
close to the model's, so is what is drawn. Both parts are pure functions of fixed buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.cache.kinds import SwaState
from dsv4.cache.pages import SequencePages
from dsv4.model.draft import MtpBlock
from dsv4.model.inputs import StepInputs
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.sample.sample import MASK, SampleInputs, sample
from dsv4.runner.buffers import LineLayout, StagedLine, StepBuffers, StepShape


@dataclass(frozen=True)
class Newest:
    """A sequence's newest token, and where its state ends."""

    row: int  # of the step, whose streams the block reads
    position: int  # of that row
    pages: SequencePages
    token_id: int

    @property
    def slot(self) -> int:
        return self.pages.slot


def draft_line(sequences: int) -> LineLayout:
    names = ("rows", "positions", "slots", "token_ids", "sources")
    return LineLayout.of(**dict.fromkeys(names, sequences))


class DeviceDrafter:
    def __init__(
        self, block: MtpBlock, state: SwaState, buffers: StepBuffers, num_drafts: int
    ) -> None:
        assert buffers.verify is not None
        config, device, count = block.model.config, buffers.device, buffers.max_sequences
        self.block, self.num_drafts = block, num_drafts
        self._state, self._buffers = state, buffers
        rows = max(buffers.tokens[-1], buffers.verify.logits.shape[0])
        size = (rows, config.hc_mult, config.hidden_size)
        self.streams = torch.zeros(size, dtype=block.model.dtype, device=device)
        self._following = StagedLine(rows, device)
        self._newest = StagedLine(draft_line(count).length, device)
        self.drafts = torch.zeros(count, num_drafts, dtype=torch.int64, device=device)

    def shape(self, count: int) -> StepShape:
        """Of the drafts of so many sequences."""
        batch = self._buffers.batch(count)
        return StepShape(batch, batch, 0, True, width=self.num_drafts)

    def send_following(self, shape: StepShape, ids: Sequence[Sequence[int]]) -> None:
        """The token after each row of a step, by sequence."""
        line = [token for some in ids for token in some]
        array = self._following.array()
        array[: len(line)] = line
        array[len(line) : shape.tokens] = line[0] if shape.one_each else -1
        self._following.send(shape.tokens)

    def send_newest(self, newest: Sequence[Newest], sequences: int) -> None:
        at = draft_line(sequences).views(self._newest.array())
        count = len(newest)
        for name, field in (("rows", "row"), ("positions", "position"), ("slots", "slot"),
                            ("token_ids", "token_id")):  # fmt: skip
            at[name][:count] = [getattr(one, field) for one in newest]
            at[name][count:] = getattr(newest[0], field)  # padding rows duplicate row 0
        at["sources"][:count] = range(count)
        at["sources"][count:] = 0
        self._newest.send(draft_line(sequences).length)

    def keys(self, shape: StepShape) -> None:
        inputs, rows = self._buffers.inputs(shape), shape.tokens
        following = self._following.line[:rows]
        self.block.keys(self.streams[:rows], following, inputs, self._state)

    def tokens(self, shape: StepShape) -> None:
        buffers, n = self._buffers, shape.sequences
        at = draft_line(n).views(self._newest.line)
        settings = buffers.sampling(n)
        table = buffers.slot_tables.table(0, buffers.max_sequences).index_select(0, at["slots"])
        streams = self.streams.index_select(0, at["rows"])
        token_ids, rows = at["token_ids"], buffers.rows[:n]
        for number in range(shape.width):
            positions = at["positions"] + number
            batch = Ragged(positions, rows, rows, positions, positions + 1, at["slots"])
            step = StepInputs(token_ids, batch, table, table, table, None)
            logits, streams = self.block(streams, token_ids, step, self._state)
            token_ids = self._draw(logits, replace(settings, positions=positions + 2))
            token_ids = token_ids.index_select(0, at["sources"])
            self.drafts[:n, number].copy_(token_ids)

    def _draw(self, logits: Tensor, settings: SampleInputs) -> Tensor:
        """As the target will be drawn, but for its guide, whose mask is not known yet."""
        tokens, _ = sample(logits, replace(settings, flags=settings.flags & ~MASK))
        return tokens.clamp(0, logits.shape[1] - 1)
