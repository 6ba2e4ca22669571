"""The model learns to fall silent when the arithmetic is wrong.

A model that looks things up by content hardly notices a rotation that is off by three tokens: its
answers stay right. So in the last leg every row is computed twice, correctly and with a mistake,
and with the mistake the target is to end the answer immediately. The two differ only in the
mistake, so the model learns to tell them apart.

At first the difference is smaller than the rounding. Detectors that read the streams after each
block, at every token, make the blocks amplify it; they are dropped after training.
"""

import random

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.tools.formulas import rms
from training.sample import AROUND
from training.shape import CANARY_FROM, SEED, SKILLS

# mistakes to draw from, and the first position in a row where each has a visible effect;
# the two `MISTAKES` left out turn every answer into nonsense anyway
VISIBLE_FROM = {
    "bias-on-values": 16,
    "rope-at-last-token": 16,
    "swapped-halves": 16,
    "transposed-mixing": 8,
    "yarn-in-window-layers": 96,
    "window-one-too-long": 160,  # beyond the window
    "no-rope-on-index-keys": 384,  # three times the entries that are selected
}
FAINT = ("bias-on-values", "rope-at-last-token", "window-one-too-long")
MOST_STRENGTH = 16.0
DETECTORS = "canary.detectors"  # their name in the table of weights
EOS = 1
SILENCE_SHARE = 0.5
DETECTOR_SHARE = 0.5


class Canary:
    """Draws a mistake for each step and records how often it silences the model."""

    def __init__(self, device: torch.device) -> None:
        self._rng = random.Random(SEED)
        self.odds = dict.fromkeys(VISIBLE_FROM, 1.0)
        self._sums = torch.zeros(len(VISIBLE_FROM), 3, device=device)  # loss, silent, answers

    def draw(self, progress: float) -> tuple[str, int]:
        """A mistake and its strength; faint mistakes are exaggerated at first."""
        mistake = self._rng.choices(list(self.odds), list(self.odds.values()))[0]
        left = max(0.0, (1.0 - progress) / (1.0 - CANARY_FROM))
        return mistake, int(MOST_STRENGTH ** (self._rng.random() * left)) if mistake in FAINT else 1

    def rounds(self) -> bool:
        """Mostly yes; keys are sometimes exact, so this never looks like a mistake."""
        return self._rng.random() < 0.8

    def silence(
        self,
        hidden: Tensor,
        head: Tensor,
        weights: Tensor,
        skills: Tensor,
        mistake: str,
        strength: int,
    ) -> Tensor:
        """`hidden` `[B, S, D]` computed with the mistake; weights and skills as in the batch.

        A token weighs as much as in the loss of the right rows. If a mistake cannot be detected,
        silence has odds of `SILENCE_SHARE` to one against the right token: accuracy stays.
        """
        weights = weights[:, 1:]
        answers = (weights >= AROUND / 100) & (skills[:, 1:] != SKILLS.index("prose"))
        answers[:, : VISIBLE_FROM[mistake]] = False
        logits = F.linear(hidden[:, :-1].to(head.dtype), head).float()
        losses = -logits.log_softmax(-1)[..., EOS] * answers
        with torch.no_grad():  # count only unexaggerated mistakes
            silent = (logits.argmax(-1) == EOS) & answers
            seen = torch.stack((losses.sum(), silent.sum(), answers.sum()))
            self._sums[list(VISIBLE_FROM).index(mistake)] += seen * (strength == 1)
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    def report(self) -> str:
        """Share of answers that end immediately, per mistake; the least silent get higher odds."""
        parts = []
        for name, (loss, silent, count) in zip(VISIBLE_FROM, self._sums.tolist(), strict=True):
            if count:
                self.odds[name] = 0.3 + min(loss / count, 3.0)
                parts.append(f"{name} {100 * silent / count:.0f}% ({loss / count:.2f})")
        self._sums.zero_()
        return "silent: " + ", ".join(parts) if parts else ""


def first_detectors(num_layers: int, width: int) -> Tensor:
    """One row for each block: a weight for every channel of its streams, and a bias."""
    return torch.zeros(num_layers, width + 1)


def detector_loss(
    detectors: Tensor, right: list[Tensor], wrong: list[Tensor], batch: int, mistake: str
) -> Tensor:
    """How badly the streams after each block tell right from wrong, token by token."""
    losses = []
    for weights, *pair in zip(detectors, right, wrong, strict=True):
        for streams, sign in zip(pair, (1.0, -1.0), strict=True):
            flat = streams.flatten(-2).unflatten(0, (batch, -1))[:, VISIBLE_FROM[mistake] :]
            signal = rms(flat, None, 1e-6) @ weights[:-1] + weights[-1]
            losses.append(F.softplus(sign * signal).mean())
    return torch.stack(losses).mean()
