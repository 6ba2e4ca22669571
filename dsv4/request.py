"""What goes in and out of the engine: Request, SamplingParams, Guide, Output, Stats."""

import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dsv4.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64
MAX_GUIDE_CHARACTERS = 65536
MAX_GUIDE_DEPTH = 64
MAX_FORMAT_DEPTH = 32  # of the structure around the schemas
MAX_REGEX_CHARACTERS = 8192
MAX_REGEX_PARTS = 256  # character classes, and repetitions
MAX_REGEX_REPEAT = 4096
MAX_REGEX_DEPTH = 64
MAX_CHOICES = 4096
MAX_PRIORITY = 100
MAX_SALT_CHARACTERS = 1024

MAX_STRUCTURE_CHARACTERS = 4 * MAX_GUIDE_CHARACTERS  # holds the schemas of many tools

GUIDE_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structure")


@dataclass(frozen=True)
class Guide:
    """A constraint on the answer's form.

    `value`: a JSON schema (an object or its text), nothing for `json_object`, a regular expression,
    a sequence of strings to choose from, an EBNF grammar, or a structure: a structural-tag format
    of the grammar library, which can name tokens. With `after_id` the answer is unconstrained
    until that token (the end of the reasoning). With `must_come`, an end marker sampled before
    `after_id` is replaced by it, so the guide always applies.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structure"]
    value: Any = None
    after_id: int | None = None
    must_come: bool = True

    def __post_init__(self) -> None:
        if self.kind not in GUIDE_KINDS:
            raise RequestError(f"guide.kind is {self.kind!r}, expected one of {GUIDE_KINDS}")
        if self.after_id is not None and (type(self.after_id) is not int or self.after_id < 0):
            raise RequestError(f"guide.after_id is {self.after_id!r}, expected a token id")
        is_structure = self.kind == "structure"
        most = MAX_STRUCTURE_CHARACTERS if is_structure else MAX_GUIDE_CHARACTERS
        if len(self.text) > most:
            raise RequestError(
                f"guide.value has {len(self.text)} characters, expected at most {most}; simplify "
                f"the {self.kind}{' (the schemas of the tools)' if is_structure else ''}"
            )

    @functools.cached_property
    def text(self) -> str:
        """The value in canonical form, after the cheap checks."""
        if self.kind == "json_object":
            _need_guide(self.value is None, self, "no value")
            return ""
        if self.kind in ("regex", "grammar"):
            _need_guide(isinstance(self.value, str) and self.value != "", self, "a text")
            return _regex(self.value) if self.kind == "regex" else str(self.value)
        if self.kind == "choice":
            good = isinstance(self.value, Sequence) and not isinstance(self.value, str | bytes)
            good = good and 0 < len(self.value) <= MAX_CHOICES
            good = good and all(isinstance(item, str) and item for item in self.value)
            _need_guide(good, self, f"1 to {MAX_CHOICES} non-empty texts")
            return json.dumps(list(self.value))
        return _schema(self)


def _need_guide(condition: bool, guide: Guide, expected: str) -> None:
    if not condition:
        found = repr(guide.value)[:200]
        raise RequestError(f"the value of a {guide.kind} guide is {found}, expected {expected}")


_REGEX_PARTS = re.compile(
    r"""(?P<escape>\\.)|(?P<cls>\[\^?\]?(?:[^\]\\]|\\.)*\])|(?P<open>\((?:\?[:=!<Pi]?)?)|(?P<close>\))
    |\{(?P<low>[0-9]+),?(?P<high>[0-9]*)\}|(?P<repeat>[*+?])|(?P<bad>[\[\\])""",
    re.X | re.S,
)


def _regex(pattern: str) -> str:
    """Checked in one linear pass: client regexes are never compiled on the serving thread."""

    def need(condition: bool, found: str) -> None:
        if not condition:
            raise RequestError(f"the guide's regular expression cannot be read: {found}")

    need(
        len(pattern) <= MAX_REGEX_CHARACTERS,
        f"found {len(pattern)} characters, expected at most {MAX_REGEX_CHARACTERS}",
    )
    depth, num_classes, num_repeats = 0, 0, 0
    for part in _REGEX_PARTS.finditer(pattern):
        kind = part.lastgroup
        need(kind != "bad", f"found {part.group()!r} that does not end, at {part.start()}")
        depth += (kind == "open") - (kind == "close")
        need(0 <= depth <= MAX_REGEX_DEPTH, f"unbalanced or too many parentheses at {part.start()}")
        num_classes += kind == "cls"
        num_repeats += kind in ("repeat", "low", "high")
        most = max(part["low"] or "0", part["high"] or "0", key=lambda text: (len(text), text))
        need(
            len(most) < 9 and int(most) <= MAX_REGEX_REPEAT,
            f"found a repetition of {most[:40]}, expected at most {MAX_REGEX_REPEAT}",
        )
    need(depth == 0, "a parenthesis is not closed")
    for name, count in (("character classes", num_classes), ("repetitions", num_repeats)):
        text = f"found {count} {name}, expected at most {MAX_REGEX_PARTS}"
        need(count <= MAX_REGEX_PARTS, text)
    return pattern


def _schema(guide: Guide) -> str:
    try:
        schema = json.loads(guide.value) if isinstance(guide.value, str) else guide.value
        _need_guide(isinstance(schema, dict | bool), guide, "an object")
        text = json.dumps(schema)  # the order of properties is the order of the answer
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"the guide's JSON schema cannot be read: {error}") from error
    depth = deepest = 0
    for character in text:
        depth += (character in "{[") - (character in "}]")
        deepest = max(deepest, depth)
    most = MAX_GUIDE_DEPTH + (MAX_FORMAT_DEPTH if guide.kind == "structure" else 0)
    _need_guide(deepest <= most, guide, f"at most {most} levels")
    return text


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends."""

    max_tokens: int = 256
    min_tokens: int = 0  # no end marker before this many; a guide may end earlier
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: random for each request
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None  # None: the model's own end markers
    logprobs: int | None = None  # None: off; n: for the sampled token and the n best
    guide: Guide | None = None  # None: any text
    draft: bool = True  # False: one token a step, for comparisons; the answer is the same

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
        whole("min_tokens", 0, self.max_tokens, "a whole number of at most max_tokens")
        number("temperature", 0.0, 100.0, "a number from 0 to 100")
        number("top_p", math.ulp(0.0), 1.0, "a number above 0 and at most 1")
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
        need(type(self.draft) is bool, "draft", "True or False")
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
        need(self.guide is None or isinstance(self.guide, Guide), "guide", "a Guide")

    @property
    def has_penalties(self) -> bool:
        neutral = (1.0, 0.0, 0.0)
        found = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return found != neutral


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, its sampling parameters, and an id."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher runs earlier; lower ones are delayed, never starved
    deadline: float | None = None  # seconds after `add`; then the request is aborted
    cache_salt: str = ""  # prefixes are shared only among requests with the same salt

    def __post_init__(self) -> None:
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {self.priority!r}, expected a whole number from -{MAX_PRIORITY} to "
                f"{MAX_PRIORITY}"
            )
        if self.deadline is not None:
            good = type(self.deadline) in (int, float) and 0 < self.deadline < math.inf
            if not good:
                raise RequestError(f"deadline is {self.deadline!r}, expected seconds above 0")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARACTERS:
            raise RequestError(f"cache_salt: expected at most {MAX_SALT_CHARACTERS} characters")


def check_request(request: Request, vocab_size: int, max_context: int) -> None:
    """Checks that depend on the model's sizes."""
    # one position of the context is for the answer's first token
    check_prompt(request.prompt_ids, vocab_size, max_context - 1, max_context)
    params = request.params
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "stop_ids": params.stop_ids or (),
        "guide.after_id": [params.guide.after_id or 0] if params.guide is not None else (),
    }
    for name, tokens in named.items():
        for token in tokens:
            if token >= vocab_size:
                raise RequestError(f"{name} names token {token}, the last id is {vocab_size - 1}")


def check_prompt(ids: tuple[int, ...], vocab_size: int, limit: int, max_context: int) -> None:
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"token {place} of the prompt is {token!r}, expected an id from 0 to "
                f"{vocab_size - 1}"
            )
    if len(ids) > limit:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, expected at most {limit} in a context of "
            f"{max_context}; shorten the prompt, or raise max_context if the model allows it"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the sampled token and of the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """One step's result for one request: new tokens, new text, and whether it ended."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or id that ended it
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None  # why it was aborted or failed
    error_code: str | None = None  # "numerics_error" if its logits were NaN or infinite
    refused: bool = False  # the request is at fault, not the engine
    num_cached: int | None = None  # prompt tokens from the prefix cache; first and last output
    num_drafted: int = 0  # in the last output, for the whole answer: drafts verified,
    num_accepted: int = 0  # and of those, accepted

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @staticmethod
    def by_request(outputs: "Sequence[Output]") -> "list[Output]":
        """The outputs of each request merged into one."""
        found: dict[str, list[Output]] = {}
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
        return [Output.joined(same) for same in found.values()]

    @staticmethod
    def joined(outputs: "Sequence[Output]") -> "Output":
        """Consecutive outputs of one request merged into one."""
        if len(outputs) == 1:
            return outputs[0]
        cached = [output.num_cached for output in outputs if output.num_cached is not None]
        return replace(
            outputs[-1],
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            text="".join(output.text for output in outputs),
            logprobs=tuple(item for output in outputs for item in output.logprobs),
            num_cached=cached[-1] if cached else None,
        )


@dataclass(frozen=True)
class Completion:
    """A whole answer: a request's outputs joined."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    error: str | None
    num_cached: int


@dataclass(frozen=True)
class Stats:
    """The engine's current state, and its counters since start."""

    num_waiting: int
    num_running: int
    pages_total: dict[str, int]  # by pool: window, csa, hca
    pages_used: dict[str, int]  # held by running sequences
    pages_cached: dict[str, int]  # held only by the prefix cache; evicted when needed
    num_prefix_asked: int  # prompt tokens looked up in the prefix cache
    num_prefix_hit: int  # and found there
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_surprises: int  # steps after ready that compiled a kernel or allocated memory
    num_steps: int
    last_step_s: float
    num_finished: dict[str, int]  # by finish reason
    num_audited: int = 0  # requests rerun without the prefix cache
    num_differences: int = 0  # of those, requests with a different answer
    num_verified: int = 0  # times a sequence had drafts verified
    num_drafted: int = 0  # drafts verified
    num_accepted: int = 0  # of those, accepted
    accepted_by_place: tuple[int, ...] = ()  # the same, by place after the newest token
    experts_missing: int = 0  # in host memory, if not all fit the GPU
    num_swaps: int = 0  # of such experts for resident ones
    expert_pairs: tuple[int, int] = (0, 0)  # with tp, decoding: on the fullest rank, and in all
    home_tokens: tuple[int, int] = (0, 0)  # with attention=dp: at a step's fullest home, and in all
    ranks: tuple[dict[str, float], ...] = ()  # except rank 0: rank, node, pid, silent_s, behind


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
        num_cached=last.num_cached or 0,
    )
