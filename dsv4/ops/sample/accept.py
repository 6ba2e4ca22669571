"""A sampled token becomes its sequence's next input, where the model will read it.

Per row: the token is the next input, its position and the one after move on by one, and its
log-probability is kept for whoever asks. All in place, so that a step's end is the next one's
beginning without a word from the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.op import Arguments, Case, Kernel, Op, check


@dataclass(frozen=True)
class NextInputs:
    """`[rows]` each, written in place."""

    token_ids: Tensor
    positions: Tensor
    ends: Tensor
    chosen: Tensor  # fp32, log-probability of the token


def accept_reference(tokens: Tensor, logits: Tensor, norms: Tensor, target: NextInputs) -> None:
    target.token_ids.copy_(tokens)
    target.chosen.copy_(logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - norms)
    target.positions.add_(1)
    target.ends.add_(1)


def cases() -> Iterable[Case]:
    def build(rows: int, vocabulary: int) -> Case:
        def make(generator: torch.Generator) -> Arguments:
            def ints(high: int) -> Tensor:
                return torch.randint(0, high, (rows,), generator=generator)

            positions = ints(10**6)
            return {
                "tokens": ints(vocabulary),
                "logits": torch.randn(rows, vocabulary, generator=generator),
                "norms": torch.randn(rows, generator=generator),
                "target": NextInputs(ints(vocabulary), positions, positions + 1, torch.zeros(rows)),
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


def accept(tokens: Tensor, logits: Tensor, norms: Tensor, target: NextInputs) -> None:
    """`tokens` and `norms` `[rows]` as `sample` returns them for `logits` `[rows, vocabulary]`;
    `target` is written in place."""
    rows = tokens.shape[0]
    check(
        logits.dim() == 2 and logits.shape[0] == rows and norms.shape == (rows,),
        OP.name,
        lambda: (
            f"logits and norms have shapes {tuple(logits.shape)} and {tuple(norms.shape)}, "
            f"expected [{rows}, vocabulary] and [{rows}]"
        ),
    )
    for name in ("token_ids", "positions", "ends", "chosen"):
        found = tuple(getattr(target, name).shape)
        check(found == (rows,), OP.name, f"{name} has shape {found}, expected ({rows},)")
    if rows == 0:
        return
    OP(tokens.device, tokens=tokens, logits=logits, norms=norms, target=target)
