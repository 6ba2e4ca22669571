"""Random traffic through a runner, and each sequence of it again, alone.

The traffic mixes prompts in random pieces with decoding, submits steps before the tokens of the
step before are read, and draws with every option. Alone, a sequence is one prompt in ordinary
steps, and its tokens are drawn from those logits: tokens and log-probabilities must be the same.
"""

import random
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4.cache.pages import SequencePages
from dsv4.ops.sample.sample import MASK, SampleInputs, sample
from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.runner.runner import PENDING, Chunk, Runner, SubmittedStep
from dsv4.sampling import SamplingRow

OPTIONS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(top_k=7, min_p=0.1),
    SamplingParams(top_k=20, top_p=0.7),
    SamplingParams(presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(logit_bias={3: 4.0, 11: -100.0, 12: 2.5}),
    SamplingParams(temperature=0.7, logprobs=5),
)


@dataclass
class Story:
    """A sequence: what it is to say, and what it has said so far."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    most: int  # tokens it samples
    guided: bool = False  # only every third token may come, another third with each step
    pages: SequencePages | None = None
    results: list[TokenLogprobs] = field(default_factory=list)
    num_pending: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + [result.token_id for result in self.results]

    @property
    def is_done(self) -> bool:
        return len(self.results) + self.num_pending >= self.most

    def row(self, count: int, num_pending: int, vocab_size: int) -> SamplingRow:
        """Of the token after the first `count` sampled ones and those under way."""
        ids = self.prompt + [result.token_id for result in self.results[:count]]
        mask = thirds(vocab_size, len(ids) + num_pending) if self.guided else None
        return SamplingRow(self.params, self.seed, ids, len(self.prompt), mask)


def thirds(vocab_size: int, step: int) -> Tensor:
    """int32 words with the bits of every third token."""
    bits = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.int64)
    bits[step % 3 : vocab_size : 3] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def make_stories(rng: random.Random, count: int, vocab_size: int, longest: int) -> list[Story]:
    lengths = (1, 3, 60, 126, 128, 129, longest)
    return [
        Story(
            [rng.randrange(vocab_size) for _ in range(rng.choice(lengths))],
            OPTIONS[seed % len(OPTIONS)],
            seed,
            rng.choice((1, 5, 30, 70)),
            guided=rng.random() < 0.2,
        )
        for seed in range(count)
    ]


@dataclass
class _Under:
    submitted: SubmittedStep
    sampled: list[Story]


def _plan(runner: Runner, live: list[Story], rng: random.Random) -> list[tuple[Story, Chunk]]:
    """A random step: a token of those that decode, pieces of prompts; some are left out."""
    chunks, room = [], runner.pages.geometry.chunk_tokens
    for story in rng.sample(live, len(live)):
        assert story.pages is not None
        ids, done = story.token_ids, story.pages.length
        left = len(ids) + story.num_pending - done
        if story.is_done or rng.random() < 0.1:
            continue
        if left == 1:
            chunks.append((story, Chunk(story.pages, ids[done:] or PENDING, 1)))
        elif room:
            count = min(left, room, rng.choice((1, 2, 17, 64, 10**6)))
            room -= count
            part = ids[done : done + count]
            chunks.append((story, Chunk(story.pages, part, 1 if count == left else 0)))
    return chunks


def tell(runner: Runner, stories: list[Story], rng: random.Random, *, ahead: bool) -> int:
    """All stories to their ends; -> number of steps. `ahead`: submit before reading."""
    waiting, live, steps = list(stories), list[Story](), 0
    under: _Under | None = None
    while waiting or live or under is not None:
        if waiting and len(live) < runner.buffers.max_sequences and rng.random() < 0.6:
            story = waiting.pop()
            story.pages = runner.pages.open()
            live.append(story)
        started = None if under is not None and not ahead else _start(runner, live, rng)
        steps += started is not None
        if under is not None:
            _finish(runner, under, live)
        if started is not None and not started.submitted.is_sampled:
            vocab = runner.buffers.vocab_size
            rows = [s.row(len(s.results), s.num_pending - 1, vocab) for s in started.sampled]
            runner.sample(started.submitted, rows)
        under = started
    runner.pages.check_integrity()
    return steps


def _start(runner: Runner, live: list[Story], rng: random.Random) -> _Under | None:
    planned = _plan(runner, live, rng)
    if not planned:
        return None
    submitted = runner.submit([chunk for _, chunk in planned])
    sampled = [story for story, chunk in planned if chunk.num_logits]
    waits = any(story.guided and story.num_pending for story in sampled)
    vocab = runner.buffers.vocab_size
    rows = [story.row(len(story.results), story.num_pending, vocab) for story in sampled]
    for story in sampled:
        story.num_pending += 1
    if not waits:
        runner.sample(submitted, rows)
    return _Under(submitted, sampled)


def _finish(runner: Runner, under: _Under, live: list[Story]) -> None:
    for story, (result,) in zip(under.sampled, runner.read(under.submitted), strict=True):
        story.results.append(result)
        story.num_pending -= 1
        if len(story.results) == story.most:
            assert story.pages is not None
            live.remove(story)
            runner.pages.close(story.pages)


def ordinary_logits(runner: Runner, ids: list[int], size: int) -> Tensor:
    """Of every token, by steps of its own, without graphs."""
    pages = runner.pages.open()
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    with patch.object(runner, "_graphs", None):
        logits = [runner.step([Chunk(pages, part, len(part))]).clone() for part in parts]
    runner.pages.close(pages)
    return torch.cat(logits)


def sample_alone(logits: Tensor, rows: list[SamplingRow]) -> list[TokenLogprobs]:
    """One row after the other, each with tensors of its own."""
    found = []
    for logit_row, settings in zip(logits, rows, strict=True):
        row = logit_row.unsqueeze(0).contiguous()
        size = row.shape[1]
        words = -(-size // 32)
        mask = torch.zeros(words, dtype=torch.int32) if settings.mask is None else settings.mask
        flags = settings.flags | (0 if settings.mask is None else MASK)
        whole = {"seeds": settings.seed, "top_k": settings.params.top_k, "slots": 0, "flags": flags}
        whole["positions"] = len(settings.token_ids)
        real = {k: v for k, v in settings.settings().items() if k not in whole}
        inputs = SampleInputs(
            **{k: torch.tensor([v], device=row.device) for k, v in whole.items()},
            **{k: torch.tensor([float(v)], device=row.device) for k, v in real.items()},
            seen=settings.seen(size).unsqueeze(0).to(row.device),
            bias=settings.bias(size).unsqueeze(0).to(row.device),
            mask=mask.unsqueeze(0).to(row.device),
        )
        tokens, norms = sample(row, inputs)
        token, norm = int(tokens), norms[0]
        top: tuple[tuple[int, float], ...] = ()
        if settings.params.logprobs:
            best, ids = torch.topk(row[0], settings.params.logprobs)
            top = tuple(zip(ids.tolist(), (best - norm).tolist(), strict=True))
        found.append(TokenLogprobs(token, float(row[0, token] - norm), top))
    return found


def check_alone(story: Story, runner: Runner, size: int) -> None:
    ids, count = story.token_ids, len(story.results)
    with torch.inference_mode():
        logits = ordinary_logits(runner, ids[:-1], size)[len(story.prompt) - 1 :]
        rows = [story.row(n, 0, runner.buffers.vocab_size) for n in range(count)]
        again = sample_alone(logits, rows)
    assert again == story.results, f"{story.params} after {len(story.prompt)} tokens"
