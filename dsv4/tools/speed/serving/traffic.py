"""Traffic of a serving benchmark, and the figures measured from its answers.

Arrivals are open-loop: a request is sent when it is due, however busy the engine is. One generator
makes all arrivals and prompts, so equal options give equal traffic. Imports no torch: the HTTP
client uses it too.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4.errors import OptionError
from dsv4.request import Request, SamplingParams

PLACES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ODD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0.5},
    {"logit_bias": {7: 1.0}},
    {"logprobs": 5},
)
ODD_SHARE = 8  # one request in this many has one of these
MAX_LOAD_S = 600.0
FIRST_ID, LAST_ID = 100, 100_000  # ordinary tokens, no markers


@dataclass(frozen=True)
class Load:
    rate: float  # Poisson arrivals per second; 0: all at once
    requests: int
    num_prompt: int
    num_output: int
    num_shared: int = 0  # length of the prefix that all prompts share
    odd: bool = False  # one request in eight with penalties, a bias or log-probabilities

    def __post_init__(self) -> None:
        if self.rate < 0 or min(self.requests, self.num_prompt, self.num_output) < 1:
            raise OptionError(
                f"load {self}: expected a rate of 0 or more, and at least 1 request, 1 token in "
                "and 1 out"
            )
        if not 0 <= self.num_shared <= self.num_prompt:
            raise OptionError(f"load {self}: expected shared to be at most in")

    def __str__(self) -> str:
        pace = f"{self.rate:g} a second" if self.rate else "all at once"
        shared = f" ({self.num_shared} shared)" if self.num_shared else ""
        odd = ", odd company" if self.odd else ""
        return (
            f"{pace}, {self.requests} requests, {self.num_prompt}{shared} in, "
            f"{self.num_output} out{odd}"
        )

    @property
    def num_tokens(self) -> int:
        """Final length of one sequence."""
        return self.num_prompt + self.num_output

    @classmethod
    def parse(cls, text: str) -> "Load":
        """`rate=8,requests=48,in=512,out=64`, optionally with `shared=256`, `odd=1`."""
        names = {"rate": "rate", "requests": "requests", "in": "num_prompt", "out": "num_output",
                 "shared": "num_shared", "odd": "odd"}  # fmt: skip
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                values[names[name]] = float(value) if name == "rate" else int(value)
            except (KeyError, ValueError):
                raise OptionError(
                    f"load {text!r}: found {part!r}, expected rate=8,requests=48,in=512,out=64 "
                    "and if wanted shared=256 (tokens all prompts begin with) and odd=1"
                ) from None
        missing = [name for name, key in list(names.items())[:4] if key not in values]
        if missing:
            raise OptionError(f"load {text!r} has no {missing[0]}, expected e.g. {missing[0]}=8")
        return cls(**{**values, "odd": bool(values.get("odd", 0))})


@dataclass(frozen=True)
class Arrival:
    time_s: float
    request: Request


@dataclass
class Stream:
    """One answer as its reader saw it, in seconds since the load began."""

    due_s: float
    num_prompt: int
    times_s: list[float] = field(default_factory=list)  # of each piece
    num_tokens: int = 0
    num_cached: int = 0
    error: str | None = None

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times_s)]

    @property
    def per_token_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (self.num_tokens - 1)


class Traffic:
    def __init__(self, vocab_size: int, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._last = min(LAST_ID, max(vocab_size * 9 // 10, 1))
        self._first = FIRST_ID if self._last > 2 * FIRST_ID else 0
        self._count = 0

    def request(
        self, num_prompt: int, num_output: int, shared: Sequence[int] = (), **options: Any
    ) -> Request:
        self._count += 1
        own = [
            self._rng.randrange(self._first, self._last) for _ in range(num_prompt - len(shared))
        ]
        params = SamplingParams(
            max_tokens=num_output, temperature=1.0, seed=self._count, stop_ids=(), **options
        )
        return Request(f"request-{self._count}", (*shared, *own), params)

    def arrivals(self, load: Load) -> list[Arrival]:
        times, now = [], 0.0
        for _ in range(load.requests):
            now += self._rng.expovariate(load.rate) if load.rate else 0.0
            times.append(now)
        shared = [self._rng.randrange(self._first, self._last) for _ in range(load.num_shared)]
        found = []
        for place, time_s in enumerate(times):
            is_odd = load.odd and place % ODD_SHARE == 0
            options = ODD_OPTIONS[place // ODD_SHARE % len(ODD_OPTIONS)] if is_odd else {}
            request = self.request(load.num_prompt, load.num_output, shared, **options)
            found.append(Arrival(time_s, request))
        return found


@dataclass(frozen=True)
class LoadResult:
    """`most_tokens_per_s`: all tokens over the last arrival time, an upper bound."""

    via: str  # engine or http
    load: dict[str, Any]
    seconds: float
    last_arrival_s: float
    output_tokens: int
    tokens_per_s: float
    offered_tokens_per_s: float | None  # None: all at once
    most_tokens_per_s: float | None
    hit_rate: float  # share of the prompts' tokens that were cached
    first_ms: dict[str, float]
    gap_ms: dict[str, float]
    token_ms: dict[str, float]  # per answer: time after its first token, per token
    num_failed: int
    errors: list[str]
    num_steps: int | None = None
    num_prompt_steps: int | None = None


def summarise(
    load: Load, via: str, streams: Sequence[Stream], seconds: float, **more: Any
) -> LoadResult:
    good = [s for s in streams if s.error is None and s.times_s]
    errors = [s.error or "no token came" for s in streams if s.error or not s.times_s]
    tokens = sum(s.num_tokens for s in streams)
    last = max(s.due_s for s in streams)
    return LoadResult(
        via=via,
        load=asdict(load),
        seconds=round(seconds, 3),
        last_arrival_s=round(last, 3),
        output_tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1),
        offered_tokens_per_s=round(load.rate * load.num_output, 1) if load.rate else None,
        most_tokens_per_s=round(load.requests * load.num_output / last, 1) if last else None,
        hit_rate=round(sum(s.num_cached for s in streams) / sum(s.num_prompt for s in streams), 3),
        first_ms=percentiles([s.first_s for s in good]),
        gap_ms=percentiles([gap for s in good for gap in s.gaps_s]),
        token_ms=percentiles([s.per_token_s for s in good if s.num_tokens > 1]),
        num_failed=len(errors),
        errors=sorted(set(errors))[:3],
        **more,
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; empty without values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {
        name: round(ordered[min(int(share * len(ordered)), last)] * 1e3, 2)
        for name, share in PLACES.items()
    }


def too_long() -> OptionError:
    return OptionError(f"a load takes longer than {MAX_LOAD_S:g} s; ask for fewer requests")
