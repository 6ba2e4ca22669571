"""From logits to a token: mask, bias, penalties, temperature, filters, draw; log-probabilities.

Order: the guide's mask; logit bias; repetition penalty on every token seen in prompt or output
(positive logits divided, negative multiplied); presence and frequency penalties on output tokens;
temperature; top-k; top-p on the renormalised distribution after top-k; min-p, relative to the best
token; then the Gumbel-max draw, with random numbers that depend only on the request's seed and the
position. Temperature 0 takes the largest logit. Ties go to the lower id everywhere.

Vocabulary-sized inputs belong to a sequence's slot and are read only by rows whose flags require
them, so a request's options cost the others nothing.

Log-probabilities are the model's own, from the unmodified logits. If a row's sum is no finite
number, neither is any log-probability, and the token is -1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check, check_shape
from dsv4.ops.sample.random import uniform_rows

PENALTIES, BIAS, MASK = 1, 2, 4  # flags
IN_PROMPT = 1 << 30  # bit in `seen`, next to the number of times a token was sampled
WORD_BITS = 32  # of a mask


@dataclass(frozen=True)
class SampleInputs:
    """Per-row settings, `[rows]` each, then the slots' state; without it all flags are 0."""

    temperature: Tensor
    top_k: Tensor  # 0: off
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seeds: Tensor  # int64
    positions: Tensor  # int64, of the token being sampled
    slots: Tensor  # int64, -1: a padding row
    flags: Tensor  # int64
    seen: Tensor | None  # int32 [slots, vocabulary]: times sampled, and IN_PROMPT
    bias: Tensor | None  # fp32 [slots, vocabulary]
    mask: Tensor | None  # int32 [slots, words]: bits of the allowed tokens


WIDE = ("seen", "bias", "mask")


def _adjusted(row: Tensor, s: SampleInputs, i: int) -> Tensor:
    flags, slot = int(s.flags[i]), int(s.slots[i])
    if flags and s.seen is not None and s.bias is not None and s.mask is not None:
        if flags & MASK:
            bits = s.mask[slot].unsqueeze(1) >> torch.arange(WORD_BITS, device=row.device)
            row = torch.where((bits & 1).flatten()[: row.shape[0]] != 0, row, float("-inf"))
        if flags & BIAS:
            row = row + s.bias[slot]
        if flags & PENALTIES:
            output = s.seen[slot] & (IN_PROMPT - 1)
            scaled = torch.where(row > 0, row / s.repetition[i], row * s.repetition[i])
            row = torch.where(s.seen[slot] != 0, scaled, row)
            row = row - s.frequency[i] * output - s.presence[i] * (output > 0)
    return row


def _kept(row: Tensor, s: SampleInputs, i: int) -> Tensor:
    """Which tokens pass top-k, top-p and min-p; the best one always does."""
    ordered, ids = torch.sort(row.double(), descending=True, stable=True)
    if int(s.top_k[i]) > 0:
        ordered[int(s.top_k[i]) :] = float("-inf")
    probabilities = torch.softmax(ordered, dim=0)
    before = torch.cumsum(probabilities, 0) - probabilities
    keep = (before < s.top_p[i].double()) & (ordered > float("-inf"))
    keep &= probabilities >= s.min_p[i].double() * probabilities[0]
    keep[0] = True
    return torch.zeros_like(keep).scatter(0, ids, keep)


def sample_reference(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    norms = torch.empty(logits.shape[0], device=logits.device)
    drawn = inputs.temperature > 0
    noise: Iterator[Tensor] = iter(())
    if drawn.any():
        uniform = uniform_rows(inputs.seeds[drawn], inputs.positions[drawn], logits.shape[1])
        noise = iter(-torch.log(-torch.log(uniform)))  # Gumbel noise, one row per random draw
    for i, raw in enumerate(logits.float()):
        norms[i] = torch.logsumexp(raw, dim=0)
        row = _adjusted(raw, inputs, i)
        if drawn[i]:
            row = row / inputs.temperature[i]
            row = torch.where(_kept(row, inputs, i), row + next(noise), float("-inf"))
        tokens[i] = row.argmax() if norms[i].isfinite() else -1  # the first of equal ones
    return tokens, norms


def cases() -> Iterable[Case]:
    def build(rows: int, vocabulary: int, temperature: float, options: bool) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def full(value: float) -> Tensor:
                return torch.full((rows,), value)

            def ints(high: int, *shape: int) -> Tensor:
                return torch.randint(0, high, shape or (rows,), generator=generator)

            slots, words = rows + 2, -(-vocabulary // WORD_BITS)
            prompt = ints(2, slots, vocabulary) * IN_PROMPT
            inputs = SampleInputs(
                temperature=full(temperature),
                top_k=ints(20),
                top_p=full(0.9),
                min_p=full(0.02),
                repetition=full(1.2),
                presence=full(0.3),
                frequency=full(0.1),
                seeds=ints(2**62),
                positions=ints(10**6),
                slots=torch.randperm(slots, generator=generator)[:rows],
                flags=ints(8) if options else torch.zeros(rows, dtype=torch.int64),
                seen=(ints(3, slots, vocabulary) + prompt).int() if options else None,
                bias=torch.randn(slots, vocabulary, generator=generator) if options else None,
                mask=(ints(2**32, slots, words) - 2**31).int() if options else None,
            )
            logits = torch.randn(rows, vocabulary, generator=generator) * 3
            return {"logits": logits, "inputs": inputs}

        name = f"{rows}x{vocabulary} temperature {temperature} options {options}"
        return Case(name, make, 1e-4, 1e-4, small=vocabulary < 1000)

    yield build(3, 100, 0.0, False)
    yield build(5, 257, 0.8, True)
    yield build(1, 129280, 1.0, False)


KERNELS = (Kernel("dsv4.ops.sample.sample_triton"),)
OP = Op("sample", sample_reference, cases, KERNELS, on_cpu="dsv4.ops.cpu.sample")


def sample(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor]:
    """fp32 `[rows, vocabulary]` -> token ids `[rows]`, -1 for a row without a finite sum, and the
    log-sum-exp of each row `[rows]`, which turns logits into log-probabilities."""
    check(
        logits.dtype == torch.float32 and logits.dim() == 2,
        OP.name,
        lambda: (
            f"logits are {logits.dtype} {tuple(logits.shape)}, expected float32 [rows, vocabulary]"
        ),
    )
    rows, size = logits.shape
    widths = {"seen": size, "bias": size, "mask": -(-size // WORD_BITS)}
    for item in fields(inputs):
        tensor = getattr(inputs, item.name)
        if item.name not in WIDE:
            check_shape(OP.name, item.name, tensor, rows)
        elif tensor is not None:
            check_shape(OP.name, item.name, tensor, "slots", widths[item.name])
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device), logits.sum(1)
    return OP(logits.device, logits=logits, inputs=inputs)
