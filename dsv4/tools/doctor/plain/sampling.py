"""The distribution of the next token: the sampling settings, plainly, for one row.

In float64 and Python numbers; it shares no code with the sampler. Log-probabilities are those of
the unmodified logits.
"""

import math
from collections import Counter
from collections.abc import Sequence

from dsv4.request import SamplingParams


def distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> dict[int, float]:
    """Tokens that pass every filter and their probabilities, which sum to 1."""
    scores = _penalised(logits, params, prompt_ids, output_ids)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.temperature == 0:
        return {order[0]: 1.0}
    scaled = {token: scores[token] / params.temperature for token in order}
    weights = {t: math.exp(s - scaled[order[0]]) for t, s in scaled.items()}  # the best is 1
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)  # top-p sees what top-k leaves
    kept, before = [], 0.0
    for rank, token in enumerate(order):
        if rank == 0 or (before / total < params.top_p and weights[token] >= params.min_p):
            kept.append(token)
        before += weights[token]
    rest = sum(weights[token] for token in kept)
    return {token: weights[token] / rest for token in kept}


def _penalised(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> list[float]:
    counts, seen = Counter(output_ids), {*prompt_ids, *output_ids}
    scores = []
    for token, value in enumerate(logits):
        score = value + params.logit_bias.get(token, 0.0)
        if token in seen:
            factor = params.repetition_penalty
            score = score / factor if score > 0 else score * factor
        count = counts[token]
        score -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        scores.append(score)
    return scores


def log_probability(logits: Sequence[float], token: int) -> float:
    top = max(logits)
    return logits[token] - top - math.log(sum(math.exp(value - top) for value in logits))
