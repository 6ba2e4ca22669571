"""Everything that could surprise a request later, done once before the engine is ready.

Every shape a step can have is run three times: with launches that only compile, side by side on
all cores; for real, so that workspaces reach their size; and, for decode steps, into a graph.
Compiled kernels are kept on disk by Triton (`TRITON_CACHE_DIR`), so a second start only loads.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module

from dsv4.ops.op import kernels_only
from dsv4.ops.workspace import freeze_workspaces, workspace_bytes
from dsv4.runner.buffers import Bucket, DecodeBuffers

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # pieces done, pieces in all
ALL_LOGITS = 256  # most rows of a prompt whose logits are all wanted, as `score` asks


def prompt_lengths(chunk_tokens: int) -> list[int]:
    """Each kernel chooses its form at powers of two: one length beyond each, and the longest."""
    lengths, size = [], 2
    while size < chunk_tokens:
        lengths.append(size)
        size = 2 * size - 1 if size > 2 else 5
    return [*lengths, chunk_tokens]


class Pieces:
    """Counts pieces of work and says now and then how long the rest will take."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done = total, 0
        self._progress = progress
        self._begin = self._said = time.perf_counter()

    def __call__(self) -> None:
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self.total)
        now = time.perf_counter()
        if now - self._said > 5.0:
            self._said = now
            left = (now - self._begin) * (self.total - self.done) / self.done
            log.info("warm-up: %d of %d, about %.0f s left", self.done, self.total, left)


def warm_up(
    buffers: DecodeBuffers,
    chunk_tokens: int,
    decode: Callable[[Bucket], None],
    prompt: Callable[[int, int, int], None],
    capture: Callable[[list[Bucket], Callable[[], None]], None],
    progress: Progress | None = None,
) -> None:
    """`decode` runs a bucket's step, `prompt` a prompt of so many tokens, context and logits."""
    device = buffers.device
    buckets = buffers.buckets()
    lengths = prompt_lengths(chunk_tokens)
    prompts = [(n, buffers.contexts[-1], 1) for n in reversed(lengths)]
    # the most tokens a step can have: a whole chunk, and everyone else decodes
    prompts.insert(0, (chunk_tokens + buffers.batches[-1] - 1, buffers.contexts[-1], 1))
    prompts += [(lengths[0], context, 1) for context in buffers.contexts[:-1]]
    most = min(chunk_tokens, ALL_LOGITS)
    prompts.append((most, buffers.contexts[0], most))
    pieces = Pieces(2 * len(prompts) + 3 * len(buckets), progress)
    freeze_workspaces(device, False)

    def run_all() -> None:
        for length, context, num_logits in prompts:
            prompt(length, context, num_logits)
            pieces()
        for bucket in buckets:
            rewind(buffers)
            decode(bucket)
            pieces()

    begin = time.perf_counter()
    with _compiling(), kernels_only():  # a graph holds kernels, not references
        run_all()
    compiled = time.perf_counter()
    run_all()
    freeze_workspaces(device)
    rewind(buffers)
    capture(buckets, pieces)
    rewind(buffers)
    log.info(
        "warm-up: compiled in %.1f s, %d graphs in %.1f s, workspaces %.2f GB",
        compiled - begin,
        len(buckets),
        time.perf_counter() - compiled,
        workspace_bytes(device) / 1e9,
    )


def rewind(buffers: DecodeBuffers) -> None:
    """All places at the beginning of the first page, where garbage does no harm yet."""
    for tensor in (buffers.token_ids, buffers.positions, buffers.slots):
        tensor.zero_()
    buffers.ends.fill_(1)
    for tables in buffers.tables.values():
        for table in tables.values():
            table.zero_()


def _compiling() -> AbstractContextManager[None]:
    module = import_module("dsv4.ops.compile_triton")
    context: AbstractContextManager[None] = module.compile_only(os.cpu_count() or 1)
    return context
