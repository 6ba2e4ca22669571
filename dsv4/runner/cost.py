"""Step costs, measured once: how many prompt tokens fit between two tokens of a stream."""

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dsv4.cache.geometry import SHARED_TOKENS
from dsv4.runner.buffers import StepBuffers
from dsv4.runner.step.line import step_line
from dsv4.runner.step.shape import StepShape

log = logging.getLogger(__name__)

SAMPLES = 5  # token counts to time


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step with prompts, by its number of tokens, ascending."""

    tokens: list[int]
    ms: list[float]

    @classmethod
    def measure(cls, buffers: StepBuffers, run: Callable[[StepShape], None]) -> "StepCosts":
        """Time steps of one sequence with random tokens, in unused pages. The largest step runs
        first, at the end of the context: others find their memory in what the allocator keeps."""
        sizes = sorted({buffers.tokens[i * (len(buffers.tokens) - 1) // (SAMPLES - 1)]
                        for i in range(SAMPLES)})  # fmt: skip
        largest = buffers.shape(sizes[-1], 1, buffers.contexts[-1], one_each=False)
        _one_sequence(buffers, largest)
        try:
            run(largest)
        except torch.cuda.OutOfMemoryError as error:
            log.warning(
                "%s does not fit the GPU: %s; lower chunk_tokens, max_context or expert_memory, or "
                "end other programs on it",
                largest,
                str(error).split(". ")[0],
            )
        found = []
        for size in sizes:
            shape = buffers.shape(size, 1, buffers.contexts[0], one_each=False)
            _one_sequence(buffers, shape)
            times = []
            for _ in range(2):  # the first one also loads
                torch.cuda.synchronize()
                begin = time.perf_counter()
                run(shape)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            found.append(times[-1] * 1e3)
        return cls(sizes, found)

    def at(self, tokens: int) -> float:
        """Milliseconds, linearly interpolated between measurements."""
        place = min(max(bisect.bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        a, b = self.tokens[place - 1], self.tokens[place]
        share = (tokens - a) / (b - a)
        return self.ms[place - 1] * (1 - share) + self.ms[place] * share

    def budget(self, num_decoding: int, max_ms: float) -> int:
        """Prompt tokens allowed alongside this many decoding sequences, in whole blocks; at least
        one block, so prompts make progress."""
        tokens = SHARED_TOKENS
        while (
            tokens + num_decoding < self.tokens[-1]
            and self.at(tokens + SHARED_TOKENS + num_decoding) <= max_ms
        ):
            tokens += SHARED_TOKENS
        return tokens


def _one_sequence(buffers: StepBuffers, shape: StepShape) -> None:
    at = step_line(shape).views(buffers.step.array())
    for part in at.values():
        part[:] = 0
    rows = min(shape.tokens, shape.context)
    at["ends"][0] = rows
    at["token_ids"][:rows] = np.random.default_rng(0).integers(0, buffers.vocab_size, rows)
    at["positions"][:rows] = range(rows)
    at["token_ids"][rows:] = at["positions"][rows:] = -1
    buffers.step.send(step_line(shape).length)
