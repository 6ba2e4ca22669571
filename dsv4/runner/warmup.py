"""Compilation, allocation and graph capture, done once before the engine is ready.

Steps have few shapes (`StepBuffers.shapes`). Each runs twice: first with launches that only compile
and load, in parallel on all cores, which also grows workspaces to their final size; then to capture
a graph. Identical layers compile once. Triton caches compiled kernels on disk
(`TRITON_CACHE_DIR`), so a second start only loads them.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

import torch

from dsv4.ops.core.context import kernels_only
from dsv4.ops.core.workspace import freeze_workspaces, workspace_bytes
from dsv4.util.progress import Progress
from dsv4.util.sizes import size_text, time_text

log = logging.getLogger(__name__)


class Pieces:
    """Counts pieces of work, reports progress and logs the time left."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done = total, 0
        self._progress = progress
        self._begin = self._said = time.perf_counter()
        if progress is not None:
            progress(0, total)

    def __call__(self) -> None:
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self.total)
        now = time.perf_counter()
        if now - self._said > 5.0:
            self._said = now
            left = (now - self._begin) * (self.total - self.done) / self.done
            log.info("warm-up: %d of %d, about %s left", self.done, self.total, time_text(left))


def warm_up(
    device: torch.device,
    steps: Sequence[Callable[[], None]],
    capture: Callable[[Callable[[], None]], None],
    num_captures: int,
    progress: Progress | None = None,
) -> None:
    """`steps`: one per shape, to be compiled. `capture` then captures `num_captures` graphs and
    calls its argument after each."""
    pieces = Pieces(len(steps) + num_captures, progress)
    freeze_workspaces(device, False)
    begin = time.perf_counter()
    from dsv4.ops.core.compile_triton import compile_only  # needs Triton, which a CPU does not

    with compile_only(os.cpu_count() or 1), kernels_only():  # a graph holds kernels, not references
        for step in steps:
            step()
            pieces()
    compiled = time.perf_counter()
    freeze_workspaces(device)
    torch.cuda.empty_cache()  # graphs have their own pool, and a capture cannot free this memory
    capture(pieces)
    log.info(
        "warm-up: compiled in %.1f s, %d graphs in %.1f s, workspaces %s",
        compiled - begin,
        num_captures,
        time.perf_counter() - compiled,
        size_text(workspace_bytes(device)),
    )
