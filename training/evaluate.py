"""Held-out accuracy of the network under training.

An answer is right if, given the prompt and the right tokens so far, the most likely token is the
right one at every place. Greedy decoding then gives exactly this answer, but this check needs only
one pass over each conversation.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.tools.quality.measure import UPDATES_LENGTH
from dsv4.tools.quality.text import retrieval_prompts, updates_prompt
from dsv4.tools.quality.variants import MISTAKES
from training.network import Network, Options, Table
from training.sample import ANSWER, Encoder, Sample, assistant, user
from training.shape import SEED
from training.skills import MAKERS, make

RETRIEVAL_LENGTHS = (500, 2000, 8000, 16000)
MISTAKE_COUNT = 40  # prompts of a skill under each mistake


def held_out(skill: str, count: int) -> list[Sample]:
    """Distinct held-out prompts of a skill, always the same ones."""
    rng = random.Random(f"{SEED} {skill}")
    found: dict[str, Sample] = {}
    for _ in range(50 * count):
        sample = make(skill, rng, held_out=True)
        if skill == "arithmetic" and sample.mode != "thinking":
            continue
        found.setdefault(f"{sample.mode} {sample.messages[:-1]}", sample)
        if len(found) == count:
            break
    return list(found.values())


def retrieval_samples(num_tokens: int, count: int, encoder: Encoder) -> list[Sample]:
    samples = []
    for number in range(count):
        seed = num_tokens * 1000 + number
        ((question, fact),) = retrieval_prompts(seed, num_tokens, encoder.count)
        samples.append(Sample("retrieval", (user(question), assistant(fact.statement))))
    return samples


def updates_samples(num_tokens: int, count: int, encoder: Encoder) -> list[Sample]:
    samples = []
    for number in range(count):
        question, fact = updates_prompt(num_tokens * 1000 + number, num_tokens, encoder.count)
        samples.append(Sample("updates", (user(question), assistant(fact.statement))))
    return samples


def _padded(length: int) -> int:
    return -(-length // 128) * 128


def _rows(
    samples: list[Sample], encoder: Encoder, most_tokens: int
) -> Iterator[tuple[list[list[int]], list[list[bool]]]]:
    """Rows of equal length with the places of the last answer marked, batch by batch."""
    made = []
    for sample in samples:
        ids, weights = encoder.sample(sample)
        last = max(n for n, m in enumerate(sample.messages) if m["role"] != "assistant")
        before = Sample(
            sample.skill, sample.messages[: last + 1], sample.mode, sample.tools, sample.key
        )
        start = len(encoder.sample(before)[0])
        marks = [n >= start and w == ANSWER for n, w in enumerate(weights)]
        made.append((ids, marks))
    made.sort(key=lambda item: len(item[0]))
    while made:
        length = _padded(len(made[-1][0]))
        count = max(1, most_tokens // length)
        part, made = made[-count:], made[:-count]
        yield (
            [ids + [2] * (length - len(ids)) for ids, _ in part],
            [marks + [False] * (length - len(marks)) for _, marks in part],
        )


@torch.no_grad()
def accuracy(
    network: Network,
    table: Table,
    samples: list[Sample],
    encoder: Encoder,
    options: Options,
    most_tokens: int = 65536,
) -> float:
    device = table["head.weight"].device
    right = 0
    for rows, marks in _rows(samples, encoder, most_tokens):
        ids = torch.tensor(rows, device=device)
        wanted = torch.tensor(marks, device=device)[:, 1:]
        hidden = network.forward(table, ids, options, None).hidden[:, :-1]
        guess = _best_tokens(hidden, wanted, table["head.weight"], options.dtype)
        wrong = wanted.clone()
        wrong[wanted] = guess != ids[:, 1:][wanted]
        right += int((~wrong.any(1)).sum())
    return right / max(len(samples), 1)


def _best_tokens(hidden: Tensor, places: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    return (hidden[places].to(dtype) @ head.to(dtype).T).argmax(-1)


def all_samples(count: int, long_count: int) -> dict[str, list[Sample]]:
    """Held-out samples of everything that is measured."""
    encoder = Encoder()
    found = {skill: held_out(skill, count) for skill in MAKERS}
    for length in RETRIEVAL_LENGTHS:
        found[f"retrieval {length}"] = retrieval_samples(length, long_count, encoder)
    found[f"updates {UPDATES_LENGTH}"] = updates_samples(UPDATES_LENGTH, long_count, encoder)
    return found


def evaluate(
    network: Network, table: Table, options: Options, samples: dict[str, list[Sample]]
) -> dict[str, float]:
    encoder = Encoder()
    return {
        name: accuracy(network, table, part, encoder, options) for name, part in samples.items()
    }


def under_mistakes(
    network: Network,
    table: Table,
    options: Options,
    samples: dict[str, list[Sample]],
    right: dict[str, float],
) -> Iterator[str]:
    """The accuracy left under each mistake, the worst-hit skill first."""
    few = {
        name: part[:MISTAKE_COUNT]
        for name, part in samples.items()
        if not name.startswith("retrieval") or name == "retrieval 2000"
    }
    for mistake in MISTAKES:
        scores = evaluate(network, table, replace(options, mistake=mistake), few)
        drops = {name: right[name] - score for name, score in scores.items()}
        ranked = sorted(drops, key=lambda name: -drops[name])
        listed = ", ".join(f"{name} {100 * scores[name]:.0f}" for name in ranked)
        yield f"{mistake}: drop {100 * drops[ranked[0]]:.0f} points; {listed}"
