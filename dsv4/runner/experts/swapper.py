"""Swaps rarely visited experts for often visited ones, between steps and while they run.

One swap is in flight at a time, and copies may take only a small share of step time, since both use
the bus. Counts are read back without waiting for them.
"""

import atexit
import logging
import time
from pathlib import Path
from typing import Any

import torch

from dsv4.runner.experts.budget import COPY_GBS
from dsv4.runner.experts.residency import Residency
from dsv4.runner.experts.use import ExpertUse, write_profile

log = logging.getLogger(__name__)

TIME_SHARE = 0.02  # of step time, for copies
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
        self._swap_s = residency.budget.block_bytes / COPY_GBS / 1e9
        self._credit_s, self._last = 0.0, time.perf_counter()
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
        earned = (now - self._last) * self._time_share
        self._credit_s, self._last = min(self._credit_s + earned, 2 * self._swap_s), now
        residency = self.residency
        if residency.is_moving and not residency.finish_swap():
            return
        if self._planned and self._credit_s >= self._swap_s:
            self._credit_s -= self._swap_s
            self.num_swaps += 1
            residency.begin_swap(*self._planned.pop(0))

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
