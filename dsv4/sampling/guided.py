"""Guided output: which tokens may come next so that an answer keeps to its guide.

The grammar library (xgrammar) is an extra and is imported when the first guide is compiled, on a
thread of its own, as every compilation: a step never waits for one. A compiled guide is kept, so
the next request with it starts at once.
"""

import importlib.util
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import RequestError
from dsv4.request import Guide

log = logging.getLogger(__name__)

COMPILE_SECONDS = 30.0  # the first time includes loading the library
MAX_COMPILED = 64  # kept for later requests
MAX_COMPILED_BYTES = 64 * 2**20  # of one guide
NUM_COMPILERS = 2  # threads at work at once

_WORD_BITS = 32
_CONTROL = re.compile(rb"[\x00-\x1f]")


@dataclass
class Compiling:
    """A grammar on its way, shared by all requests with the same guide."""

    kind: str
    expires: float
    done: threading.Event = field(default_factory=threading.Event)
    grammar: Any = None
    error: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `result` has something to say: a grammar, an error, or that time is up."""
        return self.done.is_set() or time.monotonic() > self.expires

    def result(self) -> Any:
        if not self.done.is_set():
            raise RequestError(
                f"the {self.kind} guide took longer than {COMPILE_SECONDS:g} s to compile; "
                "simplify it"
            )
        if self.error is not None:
            raise RequestError(f"the {self.kind} guide cannot be used: {self.error}")
        return self.grammar


class Matcher:
    """One answer's place in its guide."""

    def __init__(self, grammar: Any, usable: Tensor, after_id: int | None) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._usable = usable  # words
        self._words = torch.zeros_like(usable).unsqueeze(0)
        self._after_id = after_id
        self._is_active = after_id is None
        self.is_stuck = False  # no token can follow; the answer cannot be finished

    def mask(self) -> Tensor | None:
        """Bits of the tokens that may come next, int32 words; None: every token may."""
        if not self._is_active:
            return None
        self._matcher.fill_next_token_bitmask(self._words, 0)
        self._words &= self._usable
        self.is_stuck = not self._words.any()
        return None if self.is_stuck else self._words[0]

    def replacement(self, token_id: int, ends: Collection[int]) -> int:
        """What takes a drawn token's place: an end before the guide has begun begins it."""
        if self._is_active or token_id not in ends:
            return token_id
        assert self._after_id is not None
        return self._after_id

    def accept(self, token_id: int) -> bool:
        """Whether the answer has ended with this token, which the mask allowed."""
        if not self._is_active:
            self._is_active = token_id == self._after_id
            return False
        self.is_stuck = self.is_stuck or not self._matcher.accept_token(token_id)
        return bool(self._matcher.is_terminated())


def _pack(bits: Sequence[bool]) -> Tensor:
    """int32 words, bit `i % 32` of word `i // 32` for each of `bits`."""
    padded = torch.zeros(-(-len(bits) // _WORD_BITS) * _WORD_BITS, dtype=torch.int64)
    padded[: len(bits)] = torch.tensor(bits, dtype=torch.int64)
    words = (padded.view(-1, _WORD_BITS) << torch.arange(_WORD_BITS)).sum(1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


class Guides:
    """Compiled guides of one tokenizer. `vocabulary`: what a token stands for, b"" for markers."""

    def __init__(self, vocabulary: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        self.vocab_size = len(vocabulary)
        self._vocabulary = list(vocabulary)
        self._stop_ids = sorted(stop_ids)
        self._all = _pack([True] * len(vocabulary))
        self._plain = _pack([_CONTROL.search(token) is None for token in vocabulary])
        self._compiler: Any = None
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(NUM_COMPILERS)
        self._known: OrderedDict[tuple[str, str], Compiling] = OrderedDict()

    def compile(self, guide: Guide) -> Compiling:
        """Returns at once; the same guide is compiled once."""
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(
                "guided output needs the xgrammar library; install it with pip install "
                "'dsv4[guided]', or leave out the guide"
            )
        _check_patterns(guide)
        key = (guide.kind, guide.text)
        found = self._known.get(key)
        if found is None:
            found = Compiling(guide.kind, time.monotonic() + COMPILE_SECONDS)
            self._known[key] = found
            name = f"compile {guide.kind}"
            threading.Thread(
                target=self._compile, args=(guide, found), name=name, daemon=True
            ).start()
        self._known.move_to_end(key)
        while len(self._known) > MAX_COMPILED:
            self._known.popitem(last=False)
        return found

    def matcher(self, compiling: Compiling, guide: Guide) -> Matcher:
        # the library lets control characters into bounded strings; JSON has none, and we ask for
        # no line breaks between values either
        is_json = guide.kind in ("json_schema", "json_object")
        usable = self._plain if is_json else self._all
        return Matcher(compiling.result(), usable, guide.after_id)

    def _compile(self, guide: Guide, job: Compiling) -> None:
        with self._slots:
            try:
                job.grammar = _compile(self._get_compiler(), guide)
            except Exception as error:  # the library raises RuntimeError for all it cannot do
                job.error = _words_of(error)
            job.done.set()

    def _get_compiler(self) -> Any:
        with self._lock:
            if self._compiler is None:
                import xgrammar

                info = xgrammar.TokenizerInfo(
                    self._vocabulary,
                    vocab_type=xgrammar.VocabType.RAW,
                    vocab_size=self.vocab_size,
                    stop_token_ids=self._stop_ids,
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler


def _compile(compiler: Any, guide: Guide) -> Any:
    if guide.kind == "regex":
        grammar = compiler.compile_regex(guide.text)
    elif guide.kind == "choice":
        choices = " | ".join(_literal(choice) for choice in json.loads(guide.text))
        grammar = compiler.compile_grammar(f"root ::= {choices}")
    else:
        schema = guide.text or '{"type": "object", "additionalProperties": true}'
        # one way to write each value, or white space could go on for ever
        grammar = compiler.compile_json_schema(schema, any_whitespace=False)
    if grammar.memory_size_bytes > MAX_COMPILED_BYTES:
        raise RequestError(
            f"it takes {grammar.memory_size_bytes} bytes compiled, expected at most "
            f"{MAX_COMPILED_BYTES}; simplify it"
        )
    return grammar


def _literal(text: str) -> str:
    """A text as the grammar notation spells it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def _check_patterns(guide: Guide) -> None:
    """The library drops look-around in a schema's patterns; dropping it silently is not for us."""
    if guide.kind == "json_schema" and re.search(r"\(\?(?!:)", guide.text):
        raise RequestError(
            "the guide's JSON schema has a pattern with a group like (?=...); only (...) and "
            "(?:...) can be followed"
        )


def _words_of(error: Exception) -> str:
    """The library's message without its time and source line."""
    return re.sub(r"^\[[^\]]*\] \S+: ", "", str(error)).strip()[:500]
