"""Checks that the engine samples as its settings say: each setting against the plain formulas.

The sampler runs as in the engine, on this device. With temperature 0 the token itself is compared;
otherwise many draws of one distribution: none outside the filters, no likely token missing, and
frequencies as expected. Seeds are fixed, so the result is reproducible.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from dsv4.cache.geometry import Geometry
from dsv4.cache.pages import SequencePages
from dsv4.config import ModelConfig
from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.runner.buffers import StepBuffers
from dsv4.runner.forward import sample_tokens
from dsv4.runner.sampling_rows import SamplingRows
from dsv4.sampling import SamplingRow
from dsv4.tools.doctor.device.ops import OpResult
from dsv4.tools.doctor.plain.sampling import distribution, log_probability

VOCABULARY = 24
NUM_DRAWS = 400
NUM_GREEDY = 20
PROMPT, OUTPUT = (3, 4, 5, 4), (5, 6, 6, 7)
_FEWEST = 5.0  # expected draws of a token with its own bin
_SURE = 20.0  # expected draws of a token that must occur
_LOGPROB = 1e-4


@dataclass(frozen=True)
class Setting:
    name: str
    params: SamplingParams


SETTINGS = tuple(
    Setting(", ".join(f"{key} {value}" for key, value in given.items()), SamplingParams(**given))
    for given in (
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"temperature": 1.5, "top_p": 0.7},
        {"top_k": 5, "top_p": 0.8},
        {"logit_bias": {2: 2.0, 9: -3.0}},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.9},
    )
)


def check_sampling(device: str, settings: Sequence[Setting] | None = None) -> Iterator[OpResult]:
    for setting in SETTINGS if settings is None else settings:
        for case, problem in (
            (f"{setting.name}, drawn", _drawn(setting.params, device)),
            (f"{setting.name}, greedy", _greedy(setting.params, device)),
        ):
            status, error = ("wrong", float("inf")) if problem else ("ok", 0.0)
            yield OpResult("sample", case, "sampler", status, error, detail=problem or "")


def _row(seed: int) -> list[float]:
    """Logits with probabilities from 0.3 down to a thousandth, without ties."""
    rng = Random(seed)
    return [rng.gauss(0.0, 1.5) for _ in range(VOCABULARY)]


def _sample(
    rows: Sequence[Sequence[float]], params: SamplingParams, device: str
) -> list[TokenLogprobs]:
    """A step's second half as in the runner: send settings and slots, sample, read back."""
    count, config = len(rows), replace(ModelConfig(), vocab_size=VOCABULARY)
    geometry = Geometry(config, "fp32", "fp32", chunk_tokens=16)
    buffers = StepBuffers(geometry, count, 16, torch.device(device))
    buffers.logits.copy_(torch.tensor(rows, dtype=torch.float32))
    sampling, tokens = SamplingRows(buffers), [*PROMPT, *OUTPUT]
    settings = [SamplingRow(params, seed, tokens, len(PROMPT)) for seed in range(count)]
    owners = [SequencePages(slot) for slot in range(count)]
    sample_tokens(buffers, sampling.prepare(settings, owners, [len(tokens)] * count))
    pending = sampling.read_back(settings)
    for error in pending.failures.values():
        raise error
    return pending.wait()


def _greedy(params: SamplingParams, device: str) -> str | None:
    params = replace(params, temperature=0.0)
    rows = [_row(seed) for seed in range(NUM_GREEDY)]
    for row, found in zip(rows, _sample(rows, params, device), strict=True):
        [wanted] = distribution(row, params, PROMPT, OUTPUT)
        if found.token_id != wanted:
            return f"took token {found.token_id}, expected {wanted}"
        problem = _logprob(row, found)
        if problem:
            return problem
    return None


def _logprob(row: Sequence[float], found: TokenLogprobs) -> str | None:
    wanted = log_probability(row, found.token_id)
    if abs(found.logprob - wanted) <= _LOGPROB:
        return None
    return f"the log-probability of token {found.token_id} is {found.logprob:g}, not {wanted:g}"


def _drawn(params: SamplingParams, device: str) -> str | None:
    row = _row(1)
    results = _sample([row] * NUM_DRAWS, params, device)
    counts = Counter(found.token_id for found in results)
    wanted = distribution(row, params, PROMPT, OUTPUT)
    expected = {token: NUM_DRAWS * share for token, share in wanted.items()}
    for token, count in counts.most_common():
        if token not in expected:
            return f"drew token {token} {count} times, the settings leave it out"
    for token, mean in expected.items():
        if mean >= _SURE and token not in counts:
            return f"never drew token {token} in {NUM_DRAWS} draws, expected {mean:.0f} times"
    problem = _frequencies(counts, expected)
    return problem or next((p for p in (_logprob(row, found) for found in results) if p), None)


def _frequencies(counts: Counter[int], expected: dict[int, float]) -> str | None:
    """A chi-square test with fixed seeds; the limit is about eight deviations."""
    own = [token for token, mean in expected.items() if mean >= _FEWEST]
    pairs = [(counts[token], expected[token]) for token in own]
    rest = sum(expected.values()) - sum(expected[token] for token in own)
    if rest >= _FEWEST:
        pairs.append((counts.total() - sum(counts[token] for token in own), rest))
    freedom = len(pairs) - 1
    square = sum((found - mean) ** 2 / mean for found, mean in pairs)
    if square <= freedom + 8 * (2 * freedom) ** 0.5 + 10:
        return None
    token = max(own, key=lambda t: (counts[t] - expected[t]) ** 2 / expected[t])
    return (
        f"draws do not follow the distribution (chi-square {square:.0f} on {freedom}): token "
        f"{token} came {counts[token]} times, expected {expected[token]:.0f}"
    )
