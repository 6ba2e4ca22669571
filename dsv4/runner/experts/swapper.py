"""Swaps rarely visited experts for often visited ones, between steps and while they run.

One swap is in flight at a time, in pieces: what is copied beside a step takes the bus only a small
share of the step's time. Counts are read back without waiting for them.
"""

import atexit
import logging
import time
from typing import Any

import torch

from dsv4.runner.experts.budget import COPY_GBS
from dsv4.runner.experts.residency import Residency
from dsv4.runner.experts.usage import ExpertProfile, ExpertUse, write_profile
from dsv4.runner.ranks.cluster import PCIE5_GBS

log = logging.getLogger(__name__)

# Of a step, for copies; less the more of it the bus is busy with missing experts, since both then
# take longer (docs/LOG.md). No step is to get more than 2 % longer: computed, not measured.
TIME_SHARE = 0.018
LONGER = 1.5  # a step is at most this many times as long as the one before; the rest is a pause
SHORTEST_S = 1e-6  # of a step: a clock may stand still once
READ_EVERY = 32  # steps
MOST_PLANNED = 64  # swaps, until counts are read again


class Swapper:
    def __init__(
        self,
        residency: Residency,
        use: ExpertUse,
        profile: ExpertProfile | None = None,
        bus_gbs: float = PCIE5_GBS,
    ) -> None:
        self.residency, self.use, self.profile = residency, use, profile
        self.num_swaps = 0
        self._time_share = TIME_SHARE
        self._copy_bytes = COPY_GBS * 1e9 * bus_gbs / PCIE5_GBS  # in a second
        self._step_s, self._last = 1e-3, time.perf_counter()
        self._missing_s = 0.0  # of a step, in which missing experts are read
        self._steps = 0
        self._counted, self._span = 0, READ_EVERY  # the step of the newest counts, steps in them
        self._failed = False
        self._planned: list[Any] = []
        shape = residency.counts.shape
        pinned = residency.on_gpu
        self._counts = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._arriving: Any = None
        if profile is not None:
            atexit.register(self.save)

    def between_steps(self) -> None:
        """Called before a step is queued; takes microseconds. If it fails, swapping ends and the
        step runs: until a swap is finished, tables point at the old places."""
        if self._failed:
            return
        try:
            self._swap()
        except (RuntimeError, OSError, MemoryError) as error:  # RuntimeError: what CUDA reports
            self._failed = True
            log.warning(
                "experts are no longer swapped, answers go on (%s: %s)", type(error).__name__, error
            )

    def _swap(self) -> None:
        self._steps += 1
        if self._steps % READ_EVERY == 0 and self._arriving is None:
            self._counted, self._span = self._steps, self._steps - self._counted
            self._counts.copy_(self.residency.counts, non_blocking=True)
            self._arriving = self.residency.recorded() or True
        if self._arriving is True or (self._arriving is not None and self._arriving.query()):
            self._read()
        now = time.perf_counter()
        self._step_s = max(min(now - self._last, LONGER * self._step_s), SHORTEST_S)
        self._last = now
        residency = self.residency
        if (not residency.is_moving or residency.finish_swap()) and self._planned:
            self.num_swaps += 1
            residency.begin_swap(*self._planned.pop(0))
        if residency.is_moving:
            # counts are of past steps: a prompt among them may have missed more than this step can
            share = self._time_share / (1 + min(1.0, self._missing_s / self._step_s))
            residency.copy_some(int(self._step_s * share * self._copy_bytes))

    def _read(self) -> None:
        self._arriving = None
        residency, experts = self.residency, self.residency.budget.num_experts
        new = self.use.read(self._counts[:, :experts].numpy())
        missing = int(new[~residency.settled].sum()) * residency.layout.nbytes / self._span
        self._missing_s = missing / self._copy_bytes
        self._planned = self.use.swaps(self.residency.settled, MOST_PLANNED)

    def save(self) -> None:
        """Write the profile, with everything counted so far."""
        if self.profile is None:
            return
        self._counts.copy_(self.residency.counts)
        self.use.read(self._counts[:, : self.residency.budget.num_experts].numpy())
        try:
            write_profile(self.profile, self.use.visits)
        except OSError as error:
            log.warning("the expert profile is not kept: %s", error)

    def close(self) -> None:
        atexit.unregister(self.save)
        try:
            self.save()
        finally:
            self.residency.close()
