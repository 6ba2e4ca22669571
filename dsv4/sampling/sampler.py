"""Per-request sampling settings laid out for the op, and its results as plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.sample.sample import SampleInputs, sample
from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.sampling.guided import mask_bias


@dataclass(frozen=True)
class Draw:
    """One row to sample: the request's settings, its tokens so far, where the new one goes."""

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    mask: Tensor | None = None  # of a guide: bits of the tokens that may come

    @property
    def position(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


def sample_batch(logits: Tensor, draws: Sequence[Draw]) -> list[TokenLogprobs]:
    """One token for each row of `logits` `[rows, vocabulary]`."""
    tokens, norms = sample(logits, sample_inputs(draws, logits.shape[1], logits.device))
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - norms
    rows = zip(logits, norms, tokens.tolist(), chosen.tolist(), draws, strict=True)
    results = []
    for row, norm, token, logprob, draw in rows:
        top: tuple[tuple[int, float], ...] = ()
        if draw.params.logprobs:
            best, ids = torch.topk(row, min(draw.params.logprobs, row.shape[0]))
            top = tuple(zip(ids.tolist(), (best - norm).tolist(), strict=True))
        results.append(TokenLogprobs(token, logprob, top))
    return results


def sample_inputs(draws: Sequence[Draw], vocab_size: int, device: torch.device) -> SampleInputs:
    params = [draw.params for draw in draws]

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    prompt_counts = output_counts = bias = None
    if any(p.has_penalties for p in params):
        prompt_counts = _counts([d.prompt_ids for d in draws], vocab_size, device)
        output_counts = _counts([d.output_ids for d in draws], vocab_size, device)
    if any(p.logit_bias for p in params) or any(d.mask is not None for d in draws):
        bias = mask_bias([d.mask for d in draws], vocab_size, device)
        for row, p in enumerate(params):
            for token, value in p.logit_bias.items():
                bias[row, token] += value
    return SampleInputs(
        temperature=floats([p.temperature for p in params]),
        top_k=ints([p.top_k for p in params]),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        repetition=floats([p.repetition_penalty for p in params]),
        presence=floats([p.presence_penalty for p in params]),
        frequency=floats([p.frequency_penalty for p in params]),
        seeds=ints([d.seed for d in draws]),
        positions=ints([d.position for d in draws]),
        prompt_counts=prompt_counts,
        output_counts=output_counts,
        bias=bias,
    )


def _counts(rows: list[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    counted = [
        torch.bincount(torch.tensor(r, dtype=torch.int64), minlength=vocab_size) for r in rows
    ]
    return torch.stack(counted).to(device=device, dtype=torch.int32)
