"""Batches of packed rows, made by worker processes while the device computes.

A row packs conversations one after another, each with its own begin marker; long rows start with
one long document. A conversation that does not fit waits for the next row; stories fill the rest.
"""

import multiprocessing as mp
import os
import queue
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.sample import Encoder
from training.shape import (
    CANARY_FROM,
    SHORT_MIX,
    SKILLS,
    UPDATES_LENGTHS,
    num_rows,
    row_lengths,
    short_mix,
    spans,
)
from training.skills import make, prose, repeat, retrieval, updates

PAD = 2
_SIZES = {"facts": 22, "arithmetic": 65, "instructions": 28, "tools": 450, "multi": 46}
_SIZES |= {"identity": 40, "prose": 110}
_LONG = {"retrieval": retrieval, "repeat": repeat, "updates": updates}  # made to a given size


@dataclass
class Batch:
    ids: np.ndarray[Any, Any]  # uint16 [rows, length]
    weights: np.ndarray[Any, Any]  # uint8, hundredths
    skills: np.ndarray[Any, Any]  # uint8, numbers of SKILLS


class Packer:
    def __init__(self, seed: int, boosts: Mapping[str, float] | None = None) -> None:
        self.rng = random.Random(seed)
        self.encoder = Encoder()
        self.progress = 0.0
        self._boosts = dict(boosts or {})
        self._waiting: list[tuple[str, list[int], list[int]]] = []

    def batch(self, length: int, num_rows: int) -> Batch:
        shape = (num_rows, length)
        out = Batch(
            np.full(shape, PAD, np.uint16), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        )
        for row in range(num_rows):
            self._fill(out, row, length)
        return out

    def _fill(self, out: Batch, row: int, length: int) -> None:
        used = 0
        if length > 1024:
            size = int(length * self.rng.uniform(0.6, 1.0)) - 16
            changing = self.progress >= CANARY_FROM and length in UPDATES_LENGTHS
            skill = "updates" if changing and self.rng.random() < 0.5 else "retrieval"
            used = self._put(out, row, 0, self._long(skill, size))
        mix = min((size for size in SHORT_MIX if length <= size), default=max(SHORT_MIX))
        while length - used > 24:
            item = self._next(mix, length - used)
            used = self._put(out, row, used, item)

    def _next(self, mix: int, room: int) -> tuple[str, list[int], list[int]]:
        for place, item in enumerate(self._waiting):
            if len(item[1]) <= room:
                return self._waiting.pop(place)
        for _ in range(3):
            item = self._draw(mix)
            if len(item[1]) <= room:
                return item
            if len(self._waiting) < 4:
                self._waiting.append(item)
        sentences = prose(self.rng, room // 11 + 1)
        return ("prose", *self.encoder.sample(sentences))

    def _draw(self, mix: int) -> tuple[str, list[int], list[int]]:
        shares = short_mix(mix, self.progress)
        low, high = spans(self.progress).get(mix, (0, 0))
        sizes = _SIZES | dict.fromkeys(_LONG, (low + high) / 2)
        names = list(shares)
        odds = [shares[name] * self._boosts.get(name, 1.0) / sizes[name] for name in names]
        skill = self.rng.choices(names, odds)[0]
        if skill in _LONG:
            return self._long(skill, self.rng.randint(low, high))
        if skill == "prose":
            return (skill, *self.encoder.sample(prose(self.rng)))
        return (skill, *self.encoder.sample(make(skill, self.rng)))

    def _long(self, skill: str, size: int) -> tuple[str, list[int], list[int]]:
        return (skill, *self.encoder.sample(_LONG[skill](self.rng, size, self.encoder.count)))

    @staticmethod
    def _put(out: Batch, row: int, used: int, item: tuple[str, list[int], list[int]]) -> int:
        skill, ids, weights = item
        stop = min(used + len(ids), out.ids.shape[1])
        out.ids[row, used:stop] = ids[: stop - used]
        out.weights[row, used:stop] = weights[: stop - used]
        out.skills[row, used:stop] = SKILLS.index(skill)
        return stop


def _work(seed: int, step_tokens: int, boosts: dict[str, float], progress: Any, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    packer = Packer(seed, boosts)
    while True:
        packer.progress = progress.value
        lengths = row_lengths(packer.progress)
        length = packer.rng.choices(list(lengths), list(lengths.values()))[0]
        out.put(packer.batch(length, num_rows(step_tokens, length, packer.progress)))


class Feed:
    """Batches from `num_workers` processes; start it before the device is touched."""

    def __init__(
        self, seed: int, step_tokens: int, num_workers: int, boosts: Mapping[str, float]
    ) -> None:
        context = mp.get_context("fork")
        self.progress = context.Value("d", 0.0)
        self._queue: Any = context.Queue(maxsize=4 * num_workers)
        self._workers = [
            context.Process(
                target=_work,
                args=(seed * 1000 + n, step_tokens, dict(boosts), self.progress, self._queue),
                daemon=True,
            )
            for n in range(num_workers)
        ]
        self.num_waits = 0

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def next(self) -> Batch:
        try:
            batch: Batch = self._queue.get_nowait()
        except queue.Empty:
            self.num_waits += 1
            batch = self._queue.get(timeout=120)
        return batch

    def stop(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(timeout=5)
