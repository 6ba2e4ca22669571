"""Swaps rarely visited experts for often visited ones, between steps and while they run.

One swap is in flight at a time, in pieces: what is copied beside a step takes the bus only a small
share of the step's time. Counts are read back without waiting for them.
"""

import atexit
import logging
import time
from pathlib import Path
from typing import Any

import torch

from dsv4.runner.experts.budget import COPY_GBS
from dsv4.runner.experts.residency import Residency
from dsv4.runner.experts.usage import ExpertUse, write_profile

log = logging.getLogger(__name__)

TIME_SHARE = 0.02  # of a step, for copies
LONGER = 1.5  # a step is at most this many times as long as the one before; the rest is a pause
READ_EVERY = 32  # steps
MOST_PLANNED = 64  # swaps, until counts are read again


class Swapper:
    def __init__(
        self,
        residency: Residency,
        use: ExpertUse,
        profile: Path | None = None,
        time_share: float = TIME_SHARE,
    ) -> None:
        self.residency, self.use, self.profile = residency, use, profile
        self.num_swaps = 0
        self._time_share = time_share
        self._step_s, self._last = 1e-3, time.perf_counter()
        self._steps = 0
        self._planned: list[Any] = []
        shape = residency.counts.shape
        pinned = residency.on_gpu
        self._counts = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._arriving: Any = None
        if profile is not None:
            atexit.register(self.save)

    def between_steps(self) -> None:
        """Called before a step is queued; takes microseconds."""
        self._steps += 1
        if self._steps % READ_EVERY == 0 and self._arriving is None:
            self._counts.copy_(self.residency.counts, non_blocking=True)
            self._arriving = self.residency.recorded() or True
        if self._arriving is True or (self._arriving is not None and self._arriving.query()):
            self._read()
        now = time.perf_counter()
        self._step_s, self._last = min(now - self._last, LONGER * self._step_s), now
        residency = self.residency
        if (not residency.is_moving or residency.finish_swap()) and self._planned:
            self.num_swaps += 1
            residency.begin_swap(*self._planned.pop(0))
        if residency.is_moving:
            residency.copy_some(int(self._step_s * self._time_share * COPY_GBS * 1e9))

    def _read(self) -> None:
        self._arriving = None
        experts = self.residency.budget.num_experts
        self.use.read(self._counts[:, :experts].numpy())
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
        self.save()
        atexit.unregister(self.save)
        self.residency.close()
