"""One tie detector for every comparison with another implementation.

Two right implementations round differently, on every CPU in another way. Where the scores at the
border of a choice (the entries of an index, the experts of a token) are closer than the rounding
of both sides, either choice is right, and everything after it follows. Our model then takes the
other side's choice, so that all logits up to the last token stay comparable. A choice that is
further from the border than rounding explains is left alone, and the logits show it.

The rounding is measured: how far the scores of a row move when every weight moves by a part in
ten million, which is what fp32 rounds off anyway. Against transformers, the scores are apart by
0.5 of that in the median and 2.5 at most.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.ops.core.batch_invariance import matmul_rows, softplus
from dsv4.ops.core.context import observe
from dsv4.ops.core.op import Arguments, Op
from tests.oracle.harness import exact_runner, run_schedule

NUDGE = 1e-7
NUM_NUDGES = 2
MARGIN = 8.0  # two sides, each up to four times the measured movement

# for each choosing layer in the order of the computation: which candidates a token took
Choices = list[Tensor]  # bool [tokens, candidates]


def settle(scores: Tensor, ours: Tensor, theirs: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Their row where it is as good as ours, else ours; which rows were ties and differ.

    `scores`, `ours`, `theirs` `[tokens, candidates]`, `margin` `[tokens]`.
    """
    differs = ours != theirs
    border = scores.masked_fill(~ours, float("inf")).amin(1, keepdim=True)
    is_near = (scores - border).abs() <= margin.unsqueeze(1)
    tied = (is_near | ~differs).all(1) & (ours.sum(1) == theirs.sum(1)) & differs.any(1)
    return torch.where(tied.unsqueeze(1), theirs, ours), tied


def nudged(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The weights moved by about one part in ten million: another machine's rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight * (1 + NUDGE * torch.randn(weight.shape, generator=generator))
        if weight.is_floating_point()
        else weight
        for name, weight in weights.items()
    }


class ChoiceObserver:
    """Watches our model choose; `decide` may put another choice in place of its own."""

    def __init__(self) -> None:
        self.layer = -1  # number of the choosing layer, counted on over steps
        self.batch: Any = None

    def decide(self, scores: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, op: Op, arguments: Arguments, run: Any) -> Any:
        for value in arguments.values():
            self.batch = getattr(value, "batch", self.batch)
        if op.name == "index_scores":
            self.layer += 1  # `index_select` is skipped where no entry exists yet
        if op.name == "index_select":
            selected, scores = run(), arguments["scores"]
            chosen = as_mask(selected, scores.shape[1])
            return as_indices(self.decide(scores, chosen), selected.shape[1])
        if op.name == "router" and arguments["by"].table is None:
            self.layer += 1
            by = arguments["by"]
            scores = softplus(matmul_rows(arguments["x"], by.gate)).sqrt() + by.bias.float()
            experts = run()[0]
            chosen = self.decide(scores, as_mask(experts, scores.shape[1]))
            table = as_indices(chosen, experts.shape[1])
            rows = torch.arange(len(chosen)).where(arguments["token_ids"] >= 0, -1)
            by = replace(by, bias=None, table=table)
            return op.reference(x=arguments["x"], token_ids=rows, by=by)
        return run()


def as_mask(indices: Tensor, width: int) -> Tensor:
    """Indices of a row, -1 where there is none -> bool `[rows, width]`."""
    mask = torch.zeros(indices.shape[0], width + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(indices < 0, width, indices), True)[:, :width]


def as_indices(mask: Tensor, width: int) -> Tensor:
    """The inverse: ascending, a shorter row ends in -1."""
    beyond = mask.shape[1]
    numbers = torch.arange(beyond).expand_as(mask).masked_fill(~mask, beyond)
    numbers = numbers.sort(1).values[:, :width]
    return numbers.masked_fill(numbers == beyond, -1)


class Recorder(ChoiceObserver):
    """Scores and choices of one sequence in one step; `forced` takes another run's choices."""

    def __init__(self, forced: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self.forced = forced
        self.scores: dict[int, Tensor] = {}
        self.chosen: dict[int, Tensor] = {}

    def decide(self, scores: Tensor, chosen: Tensor) -> Tensor:
        self.scores[self.layer] = scores.clone()
        self.chosen[self.layer] = chosen if self.forced is None else self.forced[self.layer]
        return self.chosen[self.layer]


@dataclass(frozen=True)
class Rounding:
    """How far another rounding may move one sequence, token by token."""

    scores: dict[int, Tensor]  # of each choosing layer, [tokens]: a border closer than this is tied
    logits: Tensor  # [tokens]


def measure_rounding(config: ModelConfig, weights: dict[str, Tensor], ids: list[int]) -> Rounding:
    def run(used: dict[str, Tensor], recorder: Recorder) -> tuple[dict[int, Tensor], Tensor]:
        runner = exact_runner(config, used)
        with observe(recorder):
            logits = run_schedule(runner, [ids], [[(0, len(ids))]])[0]
        return recorder.scores, logits

    recorder = Recorder()
    scores, logits = run(weights, recorder)
    finest = torch.finfo(torch.float32).eps
    apart = {layer: finest * _finite(value).abs().amax(1) for layer, value in scores.items()}
    logits_apart = finest * logits.abs().amax(1)
    for seed in range(NUM_NUDGES):
        # forced, or a choice that flips early would pass for rounding in every later layer
        moved, moved_logits = run(nudged(weights, seed), Recorder(recorder.chosen))
        logits_apart = torch.maximum(logits_apart, (moved_logits - logits).abs().amax(1))
        for layer, value in moved.items():
            movement = _finite(value - scores[layer]).abs().amax(1)
            apart[layer] = torch.maximum(apart[layer], movement)
    return Rounding({layer: MARGIN * far for layer, far in apart.items()}, MARGIN * logits_apart)


def _finite(scores: Tensor) -> Tensor:
    return scores.masked_fill(~torch.isfinite(scores), 0.0)


class TieBreaker(ChoiceObserver):
    """Takes the other side's choice at every tie."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        sequences: list[list[int]],
        theirs: list[Choices],
    ) -> None:
        super().__init__()
        self.config, self.weights = config, weights
        self.sequences, self.theirs = sequences, theirs
        self._order = [0]
        self.num_followed = 0  # rows that were a tie and were decided by the other side
        self._rounding: dict[int, Rounding] = {}

    @contextmanager
    def step(self, order: Sequence[int] = (0,)) -> Iterator[None]:
        """Watch steps that hold these sequences, in this order."""
        self._order, self.layer = list(order), -1
        with observe(self):
            yield

    def decide(self, scores: Tensor, chosen: Tensor) -> Tensor:
        layer = self.layer % len(self.theirs[0])
        result = chosen.clone()
        for place, number in enumerate(self._order):
            own = (self.batch.seq_idx == place) & (self.batch.positions >= 0)  # no padding
            rows = torch.nonzero(own).flatten()
            if rows.numel() == 0:
                continue
            positions = self.batch.positions[rows]
            theirs = _widened(self.theirs[number][layer][positions], scores.shape[1])
            if torch.equal(theirs, chosen[rows]):
                continue
            margin = self.rounding(number).scores[layer][positions]
            result[rows], tied = settle(scores[rows], chosen[rows], theirs, margin)
            self.num_followed += int(tied.sum())
        return result

    def rounding(self, number: int) -> Rounding:
        """Measured only where the two sides disagree."""
        if number not in self._rounding:
            ids = self.sequences[number]
            self._rounding[number] = measure_rounding(self.config, self.weights, ids)
        return self._rounding[number]


def _widened(mask: Tensor, width: int) -> Tensor:
    """Both sides reserve room for entries that no row can see."""
    assert not mask[:, width:].any()
    return torch.nn.functional.pad(mask, (0, max(width - mask.shape[1], 0)))[:, :width]
