"""What goes in and out of the engine: Request, SamplingParams, Output, FinishReason."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsv4.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn afresh for each request
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None  # None: the model's own end markers
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best ones'

    def __post_init__(self) -> None:
        def need(condition: bool, name: str, expected: str) -> None:
            if not condition:
                found = getattr(self, name)
                raise RequestError(f"{name} is {found!r}, expected {expected}")

        def number(name: str, low: float, high: float, expected: str) -> None:
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool)
            need(good and math.isfinite(value) and low <= value <= high, name, expected)

        def whole(name: str, low: int, high: int, expected: str) -> None:
            value = getattr(self, name)
            need(type(value) is int and low <= value <= high, name, expected)

        whole("max_tokens", 1, 2**31, "a whole number of at least 1")
        number("temperature", 0.0, 100.0, "a number from 0 to 100")
        number("top_p", 0.0, 1.0, "a number above 0 and at most 1")
        need(self.top_p > 0, "top_p", "a number above 0 and at most 1")
        whole("top_k", 0, 2**31, "a whole number; 0 means off")
        number("min_p", 0.0, 1.0, "a number from 0 to 1")
        number("repetition_penalty", 1e-3, 1e3, "a number from 0.001 to 1000; 1 means off")
        number("presence_penalty", -2.0, 2.0, "a number from -2 to 2")
        number("frequency_penalty", -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            whole("seed", -(2**63), 2**63 - 1, "a 64-bit integer")
        if self.logprobs is not None:
            whole("logprobs", 0, MAX_LOGPROBS, f"a whole number up to {MAX_LOGPROBS}")
        if self.stop_ids is not None:
            need(
                isinstance(self.stop_ids, tuple)
                and len(self.stop_ids) <= MAX_STOP_IDS
                and all(type(token) is int and token >= 0 for token in self.stop_ids),
                "stop_ids",
                f"a tuple of at most {MAX_STOP_IDS} token ids",
            )
        need(isinstance(self.stop, tuple), "stop", "a tuple of strings")
        need(
            len(self.stop) <= MAX_STOP_STRINGS
            and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_CHARACTERS} "
            "characters",
        )
        need(
            isinstance(self.logit_bias, dict)
            and len(self.logit_bias) <= MAX_LOGIT_BIAS
            and all(
                type(token) is int
                and token >= 0
                and type(bias) in (int, float)
                and -100 <= bias <= 100
                for token, bias in self.logit_bias.items()
            ),
            "logit_bias",
            f"at most {MAX_LOGIT_BIAS} token ids with a bias from -100 to 100",
        )

    @property
    def has_penalties(self) -> bool:
        neutral = (1.0, 0.0, 0.0)
        found = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return found != neutral


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, how to continue it, and a name to speak of it."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's log-probability of a chosen token, and of the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step brought for one request: new tokens, new text, and whether it ended."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or id that ended it
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Completion:
    """A whole answer: the sum of a request's outputs."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    error: str | None


def join_outputs(request: Request, outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        request_id=request.id,
        prompt_ids=request.prompt_ids,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(item for output in outputs for item in output.logprobs),
        error=last.error,
    )
