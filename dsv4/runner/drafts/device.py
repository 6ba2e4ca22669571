"""Drafts by the checkpoint's own draft blocks, run in parts like a step.

Once a step is sampled, `keys` stores the blocks' keys for its tokens and records where each
sequence now ends; then `tokens` makes the drafts of all sequences. Both are pure functions of fixed
buffers and need no host after the sampling: the drawn tokens and the number of accepted drafts are
on the device, and drafts are also written where the next verify step reads them. Drafts are drawn
with the noise that the target will use for the same token: if the block's distribution is close to
the model's, the drawn tokens mostly agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.kinds import SwaState
from dsv4.model.draft import DraftModel, DSpark, MtpBlock
from dsv4.model.inputs import StepInputs
from dsv4.model.mhc import finish
from dsv4.model.transformer import DraftTaps
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.sample.sample import MASK, SampleInputs, sample
from dsv4.ops.sample.verify import PLACES
from dsv4.runner.buffers import StagedLine, StepBuffers, select_columns
from dsv4.runner.plan import DraftPart
from dsv4.runner.sampling_rows import PendingResults, to_host
from dsv4.runner.step.line import step_line
from dsv4.runner.step.shape import StepShape

WHOLE_SEQUENCES = 8  # of a verify step that is one graph with its drafts


@dataclass(frozen=True)
class Drafted:
    """A sequence's drafts, -1 from the first one on whose logits were NaN; the chance of each
    if those before it are right, empty if unknown."""

    token_ids: list[int]
    chances: list[float]


@dataclass
class PendingDrafts:
    """Drafts being copied to the host; `places`: their sequences' places in the step."""

    places: list[int]
    token_ids: Tensor
    chances: Tensor | None = None
    event: Any = None  # torch.cuda.Event, or None on a CPU

    @property
    def num_drafts(self) -> int:
        return self.token_ids.shape[1]

    def wait(self) -> dict[int, Drafted]:
        if self.event is not None:
            self.event.synchronize()
        chances: list[list[float]] = [[] for _ in self.places]
        if self.chances is not None:
            chances = self.chances.tolist()
        made = zip(self.token_ids.tolist(), chances, strict=True)
        return {place: Drafted(*one) for place, one in zip(self.places, made, strict=True)}


class DeviceDrafter(ABC):
    taps: DraftTaps
    has_chances = False
    makes_all = False  # fewer drafts would not be made faster

    def __init__(
        self, dtype: torch.dtype, states: Sequence[SwaState], buffers: StepBuffers, num_drafts: int
    ) -> None:
        assert buffers.verify is not None
        count, device = buffers.max_sequences, buffers.device
        self.num_drafts, self.dtype = num_drafts, dtype
        self._states, self._buffers, self._verify = states, buffers, buffers.verify
        self._line = StagedLine(2 * count, device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._offsets = torch.arange(PLACES, device=device).unsqueeze(1)
        self.drafts = self._verify.made[:, :num_drafts]  # -1: logits were NaN
        self.chances = torch.ones(count, num_drafts, device=device)

    def shape(self, count: int, num_drafts: int) -> StepShape:
        """The shape for so many drafts of this many sequences."""
        batch = self._buffers.batch(count)
        return StepShape(batch, batch, 0, True, width=num_drafts)

    def shapes(self) -> list[StepShape]:
        """Every shape that can occur, largest first."""
        found = []
        for batch in reversed(self._buffers.batches):
            most = max(self._buffers.numbers_of_drafts(batch), default=0)
            most = min(self.num_drafts, most)
            numbers = range(most, 0, -1)
            if self.makes_all and most:
                numbers = range(self.num_drafts, self.num_drafts - 1, -1)
            found += [self.shape(batch, number) for number in numbers]
        return found

    def whole_steps(self) -> list[DraftPart]:
        """Verify steps of few sequences with all that follows, for one graph each. They make as
        many drafts as they verify; others run in parts."""
        found = []
        for shape in self._buffers.draft_shapes(self._buffers.contexts):
            made = {part.width for part in self.shapes() if part.sequences == shape.sequences}
            if not self.makes_all:
                made &= {shape.width - 1, shape.width - 2}
            if shape.sequences <= WHOLE_SEQUENCES:
                found += [DraftPart("whole step", shape, number) for number in sorted(made)]
        return found

    def follow(self, part: DraftPart) -> None:
        """The rest of a whole step, once its tokens are drawn and counted. All sequences get
        drafts; `verify` has left where they start."""
        n = part.shape.sequences
        begun = self._store(part.shape, self._buffers.inputs(part.shape), are_drawn=True)
        self._make(n, part.num_drafts, self._verify.follows[:, :n], begun)

    def send(self, places: Sequence[int], counts: Sequence[int]) -> None:
        """Send which sequences of a step get drafts; `counts`: how many tokens of each sequence
        count, if the device does not know."""
        array, n = self._line.array(), len(self.drafts)
        array[:n] = places[0] if places else 0  # padding rows duplicate the first
        array[: len(places)] = places
        array[n : n + len(counts)] = counts
        self._line.send(2 * n)
        if counts:
            self._verify.counts[: len(counts)].copy_(self._line.line[n : n + len(counts)])

    def keys(self, shape: StepShape) -> None:
        """Store keys for a step's rows, given the tokens drawn from them. Page tables come from the
        slots, so the step's context does not matter."""
        inputs, n = self._buffers.inputs(shape), shape.sequences
        batch = inputs.batch
        inputs = replace(inputs, window_table=self._tables().index_select(0, batch.slots))
        ends = batch.starts + self._verify.counts[:n] if shape.width > 1 else batch.ends
        real = ends > batch.starts
        last = (ends - 1).clamp(min=0)  # before the first step there is none
        rows = (batch.first_rows + last - batch.starts).clamp(min=0)
        newest = self._buffers.newest.index_select(0, batch.slots)
        found = torch.cat((torch.stack((rows, batch.slots, newest)), last + self._offsets))
        torch.where(real, found, found[:, :1], out=self._verify.follows[:, :n])
        self._store(shape, inputs)

    def tokens(self, shape: StepShape) -> None:
        n = shape.sequences
        self._make(n, shape.width, select_columns(self._verify.follows, self._line.line[:n]))

    def _make(self, n: int, count: int, follows: Tensor, begun: Tensor | None = None) -> None:
        """`count` drafts of `n` sequences, after what `follows` says as `verify` writes it."""
        rows, slots, newest, *positions = follows
        self._draft(n, rows, newest, positions[: count + 2], slots, begun)
        self._verify.drafts[:, :count].index_copy_(0, slots, self.drafts[:n, :count])

    def read(
        self, places: Sequence[int], num_drafts: int, results: PendingResults | None = None
    ) -> PendingDrafts:
        """Start copying the drafts of these sequences to the host, without waiting. `results`: of a
        whole step, which have the drafts already."""
        n = len(places)
        if results is not None and results.verified is not None:
            made = results.verified.parts()[3][:n, :num_drafts]
        else:
            made = to_host(self.drafts[:n, :num_drafts])
        pending = PendingDrafts(list(places), made)
        if self.has_chances:
            pending.chances = to_host(self.chances[:n, :num_drafts])
        if self.drafts.is_cuda:
            pending.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.event.record()
        return pending

    @abstractmethod
    def _store(
        self, shape: StepShape, inputs: StepInputs, *, are_drawn: bool = False
    ) -> Tensor | None:
        """`are_drawn`: the tokens of all rows of a verify step are on the device. May return what
        the first draft would compute again, by row of the step."""

    @abstractmethod
    def _draft(
        self, n: int, rows: Tensor, newest: Tensor, positions: list[Tensor], slots: Tensor,
        begun: Tensor | None,
    ) -> None:  # fmt: skip
        """Write drafts of `n` sequences: after these rows of the step and the tokens drawn there,
        at the first of these positions. A draft reads two positions ahead, so there are as many
        drafts as positions, less two. `begun`: as `_store` returned it."""

    def _settings(self, n: int) -> SampleInputs:
        """Draw as the target will be drawn, but without its guide, whose mask is not known yet.
        Padding rows draw like the first sequence, which they duplicate."""
        given = self._buffers.sampling(n)
        if n > 1:
            real = torch.where(given.slots >= 0, self._buffers.rows[:n], 0)
            given = self._buffers.repeated_sampling(n, real)
        return replace(given, flags=given.flags & ~MASK)

    def _draw(self, logits: Tensor, settings: SampleInputs) -> Tensor:
        return sample(logits, settings)[0]

    def _tables(self) -> Tensor:
        return self._buffers.slot_tables.table(0, self._buffers.max_sequences)

    def _tap_rows(self, *size: int) -> Tensor:
        rows = max(self._buffers.tokens[-1], self._verify.logits.shape[0])
        return torch.zeros(rows, *size, dtype=self.dtype, device=self._buffers.device)


class MtpDrafter(DeviceDrafter):
    def __init__(self, block: MtpBlock, *drafts: Any) -> None:
        config = block.model.config
        super().__init__(block.model.dtype, *drafts)
        rows = self._tap_rows(config.hc_mult, config.hidden_size)
        self.block, self.taps = block, DraftTaps((config.num_layers - 1,), rows)

    def _store(self, shape: StepShape, inputs: StepInputs, *, are_drawn: bool = False) -> Tensor:
        # a drawn token is the next row's input, unless that row does not count
        drawn = self._verify.sampled[: shape.tokens]
        following = drawn if are_drawn else self._following(shape, inputs)
        start = self.block.start(self.taps.rows[: shape.tokens], following)
        self.block.keys(start, inputs, self._states[0])
        return start

    def _following(self, shape: StepShape, inputs: StepInputs) -> Tensor:
        """The token after each row: the next row's, or the newest after a sequence's last row."""
        batch = inputs.batch
        behind, last = self._verify.follows[2:4, : shape.sequences].unbind()
        if shape.width == 1:
            sent = step_line(shape).views(self._buffers.step.line)["next_ids"]
            behind = torch.where(sent >= 0, sent, behind)
        if shape.one_each:
            return behind
        is_last = batch.positions == last.index_select(0, batch.seq_idx)
        behind = behind.index_select(0, batch.seq_idx)
        following = torch.where(is_last, behind, inputs.token_ids.roll(-1))
        return torch.where(batch.positions < 0, -1, following)

    def _draft(
        self, n: int, rows: Tensor, newest: Tensor, positions: list[Tensor], slots: Tensor,
        begun: Tensor | None,
    ) -> None:  # fmt: skip
        if begun is None:
            start = self.block.start(self.taps.rows.index_select(0, rows), newest)
        else:
            start = begun.index_select(0, rows)
        table, order = self._tables().index_select(0, slots), self._buffers.rows[:n]
        settings, token_ids, drawn = self._settings(n), newest, list[Tensor]()
        for at, behind, wanted in zip(positions, positions[1:], positions[2:], strict=False):
            batch = Ragged(at, order, order, at, behind, slots)
            step = StepInputs(token_ids, batch, table, table, table, None)
            logits, residual = self.block(start, step, self._states[0])
            token_ids = self._draw(logits, replace(settings, positions=wanted))
            drawn.append(token_ids)
            if wanted is not positions[-1]:
                start = self.block.start(finish(residual), token_ids)
        torch.stack(drawn, 1, out=self.drafts[:n, : len(drawn)])


class DSparkDrafter(DeviceDrafter):
    makes_all = True

    def __init__(self, block: DSpark, *drafts: Any) -> None:
        config, targets = block.model.config, block.shape.targets
        super().__init__(block.model.dtype, *drafts)
        rows = self._tap_rows(len(targets), config.hidden_size)
        self.block, self.taps = block, DraftTaps(targets, rows, means=True)
        self.has_chances = block.confidence is not None

    def _store(self, shape: StepShape, inputs: StepInputs, *, are_drawn: bool = False) -> None:
        self.block.keys(self.taps.rows[: shape.tokens], inputs, self._states)

    def _draft(
        self, n: int, rows: Tensor, newest: Tensor, positions: list[Tensor], slots: Tensor,
        begun: Tensor | None,
    ) -> None:  # fmt: skip
        token_ids = newest
        base, hidden = self.block(token_ids, positions[0], slots, self._tables(), self._states)
        settings = self._settings(n)
        for number, wanted in enumerate(positions[2:]):
            logits, chances = self.block.after(base[:, number], hidden[:, number], token_ids)
            token_ids = self._draw(logits, replace(settings, positions=wanted))
            self.drafts[:n, number].copy_(token_ids)
            self.chances[:n, number].copy_(chances)


def device_drafter(
    draft: DraftModel, states: Sequence[SwaState], buffers: StepBuffers, num_drafts: int
) -> DeviceDrafter:
    if isinstance(draft, DSpark):
        return DSparkDrafter(draft, states, buffers, num_drafts)
    return MtpDrafter(draft, states, buffers, num_drafts)


def draft_parts(buffers: StepBuffers, drafter: DeviceDrafter | None) -> list[DraftPart]:
    """What drafting adds to steps of every shape; the step's context does not matter."""
    first = buffers.contexts[0]
    parts = [DraftPart("verify sampling", shape) for shape in buffers.draft_shapes([first])]
    if drafter is not None:
        shapes = (shape for shape in buffers.shapes() if not shape.scored)
        parts += [DraftPart("draft keys", shape) for shape in shapes if shape.context == first]
        parts += [DraftPart("drafts", shape) for shape in drafter.shapes()]
    return parts
