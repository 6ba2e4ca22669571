"""Runs a model over any schedule of ragged steps and collects the logits of every token."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.transformer import Transformer
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve

Schedule = list[list[tuple[int, int]]]  # steps of (sequence, number of new tokens)


def exact_runner(config: ModelConfig, weights: dict[str, Tensor]) -> Runner:
    """fp32 everywhere, no round trip; a step may hold whole prompts."""
    choices = EngineConfig(device="cpu", max_sequences=5, max_context=1024, chunk_tokens=1000)
    settings = resolve(choices, config, has_gpu=False, memory_bytes=2**33)
    return Runner(Transformer(config, weights, torch.float32), settings)


def run_schedule(
    runner: Runner,
    sequences: list[list[int]],
    schedule: Schedule,
    watch: Callable[[list[int]], AbstractContextManager[None]] = lambda order: nullcontext(),
) -> list[Tensor]:
    """Logits `[tokens, vocabulary]` of each sequence; everything is given back afterwards.

    Every step runs inside `watch`, which is told the sequences that it holds.
    """
    pages = [runner.pages.open() for _ in sequences]
    done = [0] * len(sequences)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for step in schedule:
        chunks = []
        for index, count in step:
            ids = sequences[index][done[index] : done[index] + count]
            chunks.append(Chunk(pages[index], ids, count))
            done[index] += count
        with watch([index for index, _ in step]):
            logits = runner.step(chunks)
        for (index, _), rows in zip(step, logits.split([n for _, n in step]), strict=True):
            parts[index].append(rows)
    for held in pages:
        runner.pages.close(held)
    runner.pages.check_integrity()
    assert done == [len(ids) for ids in sequences]
    return [torch.cat(rows) for rows in parts]


def whole(length: int, most: int = 256) -> Schedule:
    """One sequence in as few steps as the runner takes."""
    return [[(0, min(most, length - at))] for at in range(0, length, most)]


def random_schedule(rng: random.Random, lengths: list[int]) -> Schedule:
    """Sequences join, pause and advance by chunks of any size, one token often among them."""
    left = list(lengths)
    schedule: Schedule = []
    while any(left):
        step = []
        for index in rng.sample(range(len(left)), len(left)):
            if left[index] and rng.random() < 0.7:
                size = rng.choice((1, 1, 2, 3, 4, 5, 17, 64, 100, 200))
                count = min(size, left[index])
                step.append((index, count))
                left[index] -= count
        if step:
            schedule.append(step)
    return schedule
