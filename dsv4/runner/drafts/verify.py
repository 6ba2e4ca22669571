"""Draft rows in a step: how the host describes them, and how they are drawn.

A verify step computes logits for each sequence's newest token and its drafts. The tokens drawn from
them belong to the answer up to and including the first that differs from its draft. On a GPU all
rows are drawn together and counted there (`sample_verified`). If a row's draw depends on earlier
tokens (penalties, guides), and on a CPU, rows are drawn in rounds: row i of the sequences whose
first i drafts were right.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from dsv4.runner.buffers import StepBuffers
from dsv4.runner.plan import DraftPart
from dsv4.runner.step.shape import StepShape
from dsv4.sampling import SamplingRow

log = logging.getLogger(__name__)

TOGETHER_ON_CPU = False  # draw all rows together there too: tests of the GPU path


class Verify:
    """A verify step in flight."""

    def __init__(self, shape: StepShape, counts: Sequence[int]) -> None:
        self.shape = shape
        self.counts = list(counts)  # rows of each sequence
        self.round = -1  # round of the rows drawn last
        self._firsts = [sum(self.counts[:place]) for place in range(len(counts))]

    @property
    def places(self) -> int:
        return self.shape.sequences

    def key(self, buffers: StepBuffers) -> DraftPart:
        return DraftPart("verify sampling", replace(self.shape, context=buffers.contexts[0]))

    def next_rows(self, buffers: StepBuffers, places: Sequence[int]) -> None:
        """Copy the next row of each of these sequences into the first rows of logits."""
        self.round += 1
        assert buffers.verify is not None
        rows = [self._firsts[place] + self.round for place in places]
        index = torch.tensor(rows, dtype=torch.int64)
        if buffers.device.type == "cuda":
            index = index.pin_memory().to(buffers.device, non_blocking=True)
        torch.index_select(buffers.verify.logits, 0, index, out=buffers.logits[: len(rows)])


def samples_together(rows: Sequence[SamplingRow], device: torch.device) -> bool:
    """Whether no row's draw depends on the tokens drawn before it."""
    if device.type == "cpu" and not TOGETHER_ON_CPU:
        return False
    return all(row.mask is None and not row.params.has_penalties for row in rows)


class _Runner(Protocol):
    drafter: Any


def warm_up_drafting(runner: _Runner, warm_up: Callable[[], None]) -> None:
    """Warm up; if that fails with draft blocks, again without: answers do not need drafts."""
    try:
        warm_up()
    except Exception as error:
        if runner.drafter is None:
            raise
        log.error("draft blocks are left out, they do not run here: %s", error)
        runner.drafter = None
        warm_up()
