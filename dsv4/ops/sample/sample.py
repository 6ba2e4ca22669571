"""From logits to a token: bias, penalties, temperature, filters, a draw; and log-probabilities.

Order: logit bias; repetition penalty on every token seen in prompt or output (positive logits
divided, negative multiplied); presence and frequency penalties on output tokens; temperature;
top-k, top-p and min-p, each on the distribution after temperature; then the Gumbel-max draw with
numbers that depend on the request's seed and the position alone. Temperature 0 takes the largest
logit. Ties go to the lower id everywhere.

Log-probabilities are the model's own: of the logits as they came.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsv4.ops.op import Arguments, Case, Kernel, Op, check
from dsv4.ops.sample.random import uniform_rows


@dataclass(frozen=True)
class SampleInputs:
    """Per-row settings, `[rows]` each; counts are int32 `[rows, vocabulary]` or None."""

    temperature: Tensor
    top_k: Tensor  # 0: off
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seeds: Tensor  # int64
    positions: Tensor  # int64, of the token being sampled
    prompt_counts: Tensor | None
    output_counts: Tensor | None
    bias: Tensor | None  # [rows, vocabulary]


def _penalised(row: Tensor, s: SampleInputs, i: int) -> Tensor:
    if s.bias is not None:
        row = row + s.bias[i]
    if s.prompt_counts is not None and s.output_counts is not None:
        output = s.output_counts[i]
        seen = (s.prompt_counts[i] + output) > 0
        scaled = torch.where(row > 0, row / s.repetition[i], row * s.repetition[i])
        row = torch.where(seen, scaled, row)
        row = row - s.frequency[i] * output - s.presence[i] * (output > 0)
    return row


def _kept(row: Tensor, s: SampleInputs, i: int) -> Tensor:
    """Which tokens pass top-k, top-p and min-p; the best one always does."""
    ordered, ids = torch.sort(row, descending=True, stable=True)
    probabilities = torch.softmax(ordered.double(), dim=0)
    before = torch.cumsum(probabilities, 0) - probabilities
    keep = before < s.top_p[i].double()
    keep &= probabilities >= s.min_p[i].double() * probabilities[0]
    if int(s.top_k[i]) > 0:
        keep[int(s.top_k[i]) :] = False
    keep[0] = True
    return torch.zeros_like(keep).scatter(0, ids, keep)


def sample_reference(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    norms = torch.empty(logits.shape[0], device=logits.device)
    drawn = inputs.temperature > 0
    noise: Iterator[Tensor] = iter(())
    if drawn.any():
        uniform = uniform_rows(inputs.seeds[drawn], inputs.positions[drawn], logits.shape[1])
        noise = iter(-torch.log(-torch.log(uniform)))  # Gumbel, a row for each that draws
    for i, raw in enumerate(logits.float()):
        norms[i] = torch.logsumexp(raw, dim=0)
        row = _penalised(raw, inputs, i)
        if drawn[i]:
            row = row / inputs.temperature[i]
            row = torch.where(_kept(row, inputs, i), row + next(noise), float("-inf"))
        tokens[i] = torch.nonzero(row == row.max())[0, 0]
    return tokens, norms


def cases() -> Iterable[Case]:
    def build(rows: int, vocabulary: int, temperature: float, penalties: bool) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def count() -> Tensor | None:
                if not penalties:
                    return None
                drawn = torch.randint(0, 3, (rows, vocabulary), generator=generator)
                return drawn.to(torch.int32)

            def full(value: float) -> Tensor:
                return torch.full((rows,), value)

            inputs = SampleInputs(
                temperature=full(temperature),
                top_k=torch.randint(0, 20, (rows,), generator=generator),
                top_p=full(0.9),
                min_p=full(0.02),
                repetition=full(1.2),
                presence=full(0.3),
                frequency=full(0.1),
                seeds=torch.randint(0, 2**62, (rows,), generator=generator),
                positions=torch.randint(0, 10**6, (rows,), generator=generator),
                prompt_counts=count(),
                output_counts=count(),
                bias=torch.randn(rows, vocabulary, generator=generator) if penalties else None,
            )
            logits = torch.randn(rows, vocabulary, generator=generator) * 3
            return {"logits": logits, "inputs": inputs}

        name = f"{rows}x{vocabulary} temperature {temperature} penalties {penalties}"
        return Case(name, make, 1e-4, 1e-4, small=vocabulary < 1000)

    yield build(3, 100, 0.0, False)
    yield build(5, 257, 0.8, True)
    yield build(1, 129280, 1.0, False)


OP = Op("sample", sample_reference, cases, kernels=(Kernel("dsv4.ops.sample.sample_triton"),))


def sample(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """fp32 `[rows, vocabulary]` -> token ids `[rows]` and what to take from the logits of a row for
    log-probabilities, `[rows]`: the logarithm of the sum of their exponentials."""
    check(
        logits.dtype == torch.float32 and logits.dim() == 2,
        OP.name,
        lambda: (
            f"logits are {logits.dtype} {tuple(logits.shape)}, expected float32 [rows, vocabulary]"
        ),
    )
    for item in fields(inputs):
        tensor = getattr(inputs, item.name)
        wide = item.name in ("prompt_counts", "output_counts", "bias")
        expected = tuple(logits.shape) if wide else (logits.shape[0],)
        if tensor is not None:
            found = tuple(tensor.shape)
            check(found == expected, OP.name, f"{item.name} has shape {found}, not {expected}")
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device), logits.sum(1)
    result: tuple[Tensor, Tensor] = OP(logits.device, logits=logits, inputs=inputs)
    return result
