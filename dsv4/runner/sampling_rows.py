"""The host side of sampling: per-row settings, and the initial state of slots.

A slot's token counts and biases are written when its sequence samples for the first time; from then
on the device counts tokens itself. A guide's mask is sent with every step. If one row cannot be
prepared, only its request fails: the row is sampled with the others and its result is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.pages import SequencePages
from dsv4.errors import RankError
from dsv4.ops.sample.sample import BIAS, MASK, PENALTIES
from dsv4.request import TokenLogprobs
from dsv4.runner.buffers import StepBuffers, VerifyBuffers, VerifyResults
from dsv4.runner.step.line import sampling_arrays, sampling_line
from dsv4.sampling import SamplingRow


@dataclass
class PendingResults:
    """Results of one step, being copied to the host."""

    num_rows: int
    event: Any  # torch.cuda.Event, or None on a CPU
    tokens: Tensor | None = None
    chosen: Tensor | None = None
    tops: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # ids, log-probabilities
    failures: dict[int, Exception] = field(default_factory=dict)  # sequences to drop
    verified: VerifyResults | None = None  # on the host, if sequences have several rows
    num_sequences: int = 0  # of those
    rows: list[int] = field(default_factory=list)  # of each of these sequences, once waited for
    error: Tensor | None = None  # `Comm.error`
    load: Tensor | None = None  # `Exchange.expert_load`

    def answers(self) -> list[list[TokenLogprobs]]:
        """The tokens that count, per sequence. Waits for the step."""
        found, answers = self.wait(), []
        if self.verified is None:
            return [[result] for result in found]
        starts, ends, counts = self.verified.parts()[0][:, : self.num_sequences].tolist()
        self.rows = [end - start for start, end in zip(starts, ends, strict=True)]
        for rows, count in zip(self.rows, counts, strict=True):
            answers.append(found[:count])
            found = found[rows:]
        return answers

    def wait(self) -> list[TokenLogprobs]:
        """Wait for the step and return the results of all rows."""
        if self.event is not None:
            self.event.synchronize()
        if self.error is not None and int(self.error):
            raise RankError(
                f"rank {int(self.error) - 1} of a group did not bring its part of a step in time"
            )
        if self.tokens is None or self.chosen is None:
            return []
        both = (part[: self.num_rows].tolist() for part in (self.tokens, self.chosen))
        found = [TokenLogprobs(*pair) for pair in zip(*both, strict=True)]
        for row, (ids, logprobs) in self.tops.items():
            top = tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
            found[row] = TokenLogprobs(found[row].token_id, found[row].logprob, top)
        return found


class SamplingRows:
    def __init__(
        self, buffers: StepBuffers, error: Tensor | None = None, load: Tensor | None = None
    ) -> None:
        """`error`, `load`: from exchanges between ranks, read back with every result."""
        self._error, self._load = error, load
        self._buffers = buffers
        count = buffers.max_sequences
        self._owners: list[SequencePages | None] = [None] * count
        self._failures: dict[int, Exception] = {}  # for the rows to sample next
        self._sent = np.zeros(0, np.int64)  # last
        self._settings = {
            name: np.zeros(count, dtype=part.dtype)
            for name, part in sampling_arrays(buffers.sampling_stage.array(), 1)
            if name not in ("positions", "slots")
        }

    def prepare(
        self,
        rows: Sequence[SamplingRow],
        owners: Sequence[SequencePages],
        positions: Sequence[int],
        num_rows: int = 0,
    ) -> int:
        """Send the inputs of the next sampling; returns the number of rows, padding included."""
        buffers, count = self._buffers, len(rows)
        num_rows = num_rows or buffers.batch(count)
        masked, self._failures = [], {}
        for index, (row, pages) in enumerate(zip(rows, owners, strict=True)):
            try:
                if self._owners[pages.slot] is not pages:
                    self._enter(row, pages)
                if row.mask is not None:
                    self._send(row.mask, buffers.mask[pages.slot])
                    masked.append(index)
            except Exception as error:
                self._failures[index] = error
                self._settings["flags"][pages.slot] = 0  # its tables may be incomplete
        slots = np.fromiter((pages.slot for pages in owners), np.int64, count)
        line = np.zeros(sampling_line(num_rows).length, np.int64)
        at = dict(sampling_arrays(line, num_rows))
        for name, values in self._settings.items():
            at[name][:count] = values[slots]
        if masked:
            at["flags"][masked] |= MASK
        at["positions"][:count] = positions
        at["slots"][:count] = slots
        at["slots"][count:] = -1
        if not np.array_equal(line, self._sent):  # steps that run ahead mostly send nothing new
            self._sent = line
            buffers.sampling_stage.array()[: len(line)] = line
            buffers.sampling_stage.send(len(line))
        return num_rows

    def _enter(self, row: SamplingRow, pages: SequencePages) -> None:
        """Set up a slot when its sequence samples for the first time."""
        buffers, slot, flags = self._buffers, pages.slot, row.flags
        for name, value in {**row.settings(), "flags": flags}.items():
            self._settings[name][slot] = value
        if flags & PENALTIES:
            self._send(row.seen(buffers.vocab_size), buffers.seen[slot])
        if flags & BIAS:
            self._send(row.bias(buffers.vocab_size), buffers.bias[slot])
        self._owners[slot] = pages

    def _send(self, values: Tensor, target: Tensor) -> None:
        if target.is_cuda:
            values = values.pin_memory()  # torch keeps it alive until the copy is done
        target.copy_(values, non_blocking=True)

    def read_back(self, rows: Sequence[SamplingRow]) -> PendingResults:
        """Start copying the results to the host, without waiting."""
        return self._read(self._buffers, [(row, 1) for row in rows])

    def read_rows(self, rows: Sequence[SamplingRow], counts: Sequence[int]) -> PendingResults:
        """The same for a verify step; `counts`: rows of each sequence."""
        verify = self._buffers.verify
        assert verify is not None
        return self._read(verify, list(zip(rows, counts, strict=True)))

    def _read(
        self,
        source: StepBuffers | VerifyBuffers,
        rows: list[tuple[SamplingRow, int]],
    ) -> PendingResults:
        buffers, count = self._buffers, sum(n for _, n in rows)
        pending = PendingResults(count, None, failures=self._failures)
        if isinstance(source, VerifyBuffers):
            results = source.results
            pending.verified = verified = replace(results, line=to_host(results.line))
            _, tokens, chosen, _ = verified.parts()
            pending.tokens, pending.chosen, pending.num_sequences = tokens, chosen, len(rows)
        elif count:
            pending.tokens = to_host(source.sampled[:count])
            pending.chosen = to_host(source.chosen[:count])
        first = 0
        for place, (row, count) in enumerate(rows):
            first += count
            if not row.params.logprobs:
                continue
            try:
                most = min(row.params.logprobs, buffers.vocab_size)
                for index in range(first - count, first):
                    best, ids = torch.topk(source.logits[index], most)
                    pending.tops[index] = (to_host(ids), to_host(best - source.norms[index]))
            except Exception as error:
                pending.failures[place] = error
        if self._error is not None:
            pending.error = to_host(self._error)
        if self._load is not None:
            pending.load = to_host(self._load)
        if buffers.device.type == "cuda":
            pending.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.event.record()
        return pending


def to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
