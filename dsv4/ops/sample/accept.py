"""Stores a sampled token as its sequence's next input.

Per row: the token becomes its slot's newest, its log-probability is stored, and it is counted if
penalties need counts. All in place, so the next step can start without the host. A padding row
(slot -1) writes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.core.op import Arguments, Case, Kernel, Op, check_shape
from dsv4.ops.sample.sample import IN_PROMPT, PENALTIES


@dataclass(frozen=True)
class Sampled:
    """Written in place."""

    newest: Tensor  # [slots] int64, each sequence's newest token
    tokens: Tensor  # [rows] int64
    chosen: Tensor  # [rows] fp32, log-probability of the token
    norms: Tensor  # [rows] fp32, subtracted from logits for log-probabilities
    seen: Tensor | None  # [slots, vocabulary] int32, as `sample` reads it


def accept_reference(
    tokens: Tensor, logits: Tensor, norms: Tensor, slots: Tensor, flags: Tensor, target: Sampled
) -> None:
    tokens = tokens.clamp(min=0)  # -1: no finite sum
    target.tokens.copy_(tokens)
    target.chosen.copy_(logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - norms)
    target.norms.copy_(norms)
    real = slots >= 0
    target.newest[slots[real]] = tokens[real]
    if target.seen is not None:
        counted = real & ((flags & PENALTIES) != 0)
        target.seen[slots[counted], tokens[counted]] += 1


def cases() -> Iterable[Case]:
    def build(rows: int, vocabulary: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def ints(high: int, *shape: int) -> Tensor:
                return torch.randint(0, high, shape or (rows,), generator=generator)

            slots = rows + 2
            seen = ints(3, slots, vocabulary) + IN_PROMPT * ints(2, slots, vocabulary)
            numbers = (torch.zeros(rows), torch.zeros(rows))
            target = Sampled(ints(vocabulary, slots), ints(vocabulary), *numbers, seen.int())
            return {
                "tokens": ints(vocabulary),
                "logits": torch.randn(rows, vocabulary, generator=generator),
                "norms": torch.randn(rows, generator=generator),
                "slots": torch.randperm(slots, generator=generator)[:rows] - 1,
                "flags": ints(8),
                "target": target,
            }

        return Case(f"{rows}x{vocabulary}", make, 0.0, 0.0)

    yield build(1, 97)
    yield build(7, 1001)
    yield build(0, 97)


OP = Op(
    "accept",
    accept_reference,
    cases,
    kernels=(Kernel("dsv4.ops.sample.accept_triton"),),
    mutates=("target",),
)


def accept(
    tokens: Tensor, logits: Tensor, norms: Tensor, slots: Tensor, flags: Tensor, target: Sampled
) -> None:
    """`tokens` and `norms` `[rows]` as returned by `sample` for `logits` `[rows, vocabulary]`, with
    its `slots` and `flags`; `target` is written in place."""
    rows = tokens.shape[0]
    check_shape(OP.name, "logits", logits, rows, "vocabulary")
    check_shape(OP.name, "norms", norms, rows)
    written = {name: getattr(target, name) for name in ("tokens", "chosen", "norms")}
    for name, tensor in {"slots": slots, "flags": flags, **written}.items():
        check_shape(OP.name, name, tensor, rows)
    if rows == 0:
        return
    OP(
        tokens.device,
        tokens=tokens,
        logits=logits,
        norms=norms,
        slots=slots,
        flags=flags,
        target=target,
    )
