"""The shape of a step: token rows, sequences, tokens of context. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """The shape of a step. With one token per sequence, rows are sequences and padding rows
    duplicate row 0; otherwise padding rows come last and belong to no sequence."""

    tokens: int
    sequences: int
    context: int
    one_each: bool
    scored: bool = False  # logits of all rows, not of one per sequence
    width: int = 1  # above 1, draft rows: up to `width` per sequence, then padding rows
    homes: tuple[tuple[int, int], ...] = ()  # with attention=dp: rows and sequences of each home

    @property
    def numbers(self) -> tuple[int, ...]:
        """As a command carries it."""
        kind = int(self.one_each), int(self.scored), self.width
        at_homes = (number for home in self.homes for number in home)
        return (self.tokens, self.sequences, self.context, *kind, *at_homes)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "StepShape":
        tokens, sequences, context, one_each, scored, width, *rest = numbers
        homes = tuple(zip(rest[::2], rest[1::2], strict=True))
        return cls(tokens, sequences, context, bool(one_each), bool(scored), width, homes)

    @property
    def home_logits(self) -> tuple[int, ...]:
        """Rows of logits of each home."""
        return tuple(rows if self.scored else sequences for rows, sequences in self.homes)

    @property
    def num_logits(self) -> int:
        """Rows of logits of all homes together; a scored chunk is at one of them."""
        if not self.homes:
            return self.tokens if self.scored or self.width > 1 else self.sequences
        return max(self.home_logits) if self.scored else sum(self.home_logits)

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}x{self.sequences} context {self.context}"

    @property
    def kind(self) -> str:
        if self.width > 1:
            return "verify"
        return "decode" if self.one_each else "score" if self.scored else "prompt"


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then in steps of 8 to 64, of 16 to 128, of 32; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max(most, 128) + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def token_sizes(most: int) -> list[int]:
    """Row counts of prefill steps: in steps of 16 to 64, of 32 to 128, of 64 to 640, of 128 to
    1280, then of 256; the last is `most`."""
    sizes = [16, 32, 48, 64, 96, *range(128, 640, 64), *range(640, 1280, 128)]
    sizes += range(1280, max(most, 1280) + 1, 256)
    return [size for size in sizes if size < most] + [most]


def context_sizes(most: int) -> list[int]:
    """4096 tokens, then four times the previous size; the last is `most`."""
    sizes, size = [], 4096
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]
