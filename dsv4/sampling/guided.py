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
from collections.abc import Collection, Iterator, Sequence
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

NO_TEXT = b"\xff"  # of a token that no text matches and that a structure can name
_WORD_BITS = 32
_BOUNDED_CHARACTER = r"[^\"\\\r\n]"  # as the library writes it
_JSON_CHARACTER = r"[^\0-\x1f\"\\\r\n]"


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

    def __init__(self, grammar: Any, vocab_size: int, guide: Guide) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._words = torch.zeros((1, -(-vocab_size // _WORD_BITS)), dtype=torch.int32)
        self._after_id = guide.after_id
        self._must_come = guide.must_come
        self._is_active = guide.after_id is None
        self.is_stuck = False  # no token can follow; the answer cannot be finished

    def mask(self) -> Tensor | None:
        """Bits of the tokens that may come next, int32 words; None: every token may."""
        if not self._is_active:
            return None
        self._matcher.fill_next_token_bitmask(self._words, 0)
        self.is_stuck = not self._words.any()
        return None if self.is_stuck else self._words[0]

    def replacement(self, token_id: int, ends: Collection[int]) -> int:
        """What takes a drawn token's place: an end before a guide that must come begins it."""
        if self._is_active or not self._must_come or token_id not in ends:
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


class Guides:
    """Compiled guides of one tokenizer. `vocabulary`: what a token stands for, b"" for markers
    that never come, NO_TEXT for one that only a structure asks for."""

    def __init__(self, vocabulary: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        self.vocab_size = len(vocabulary)
        self._vocabulary = list(vocabulary)
        self._stop_ids = sorted(stop_ids)
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
        return Matcher(compiling.result(), self.vocab_size, guide)

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
    elif guide.kind == "grammar":
        grammar = compiler.compile_grammar(guide.text)
    elif guide.kind == "structure":
        tag = {"type": "structural_tag", "format": _with_grammars(json.loads(guide.text))}
        grammar = compiler.compile_structural_tag(json.dumps(tag))
    else:
        schema = guide.text or '{"type": "object", "additionalProperties": true}'
        grammar = compiler.compile_grammar(_json_grammar(schema))
    if grammar.memory_size_bytes > MAX_COMPILED_BYTES:
        raise RequestError(
            f"it takes {grammar.memory_size_bytes} bytes compiled, expected at most "
            f"{MAX_COMPILED_BYTES}; simplify it"
        )
    return grammar


def _json_grammar(schema: str) -> str:
    """A schema as a grammar with one way to write each value, or white space would be unbounded.

    The library lets control characters into strings of limited length; JSON has none.
    """
    import xgrammar

    text = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
    return text.replace(_BOUNDED_CHARACTER, _JSON_CHARACTER)


def _with_grammars(part: Any) -> Any:
    """A structure whose JSON schemas have become grammars of ours."""
    if isinstance(part, list):
        return [_with_grammars(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":
        return {"type": "grammar", "grammar": _json_grammar(json.dumps(part["json_schema"]))}
    return {name: _with_grammars(item) for name, item in part.items()}


def _literal(text: str) -> str:
    """A text as the grammar notation spells it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def _check_patterns(guide: Guide) -> None:
    """The library drops look-around in a schema's patterns; dropping it silently is not for us."""
    if guide.kind not in ("json_schema", "structure"):
        return
    for pattern in _patterns(json.loads(guide.text)):
        if re.search(r"\(\?(?!:)", pattern):
            raise RequestError(
                f"a JSON schema of the guide has the pattern {pattern[:200]!r}; of groups like "
                "(?=...) only (...) and (?:...) can be followed"
            )


def _patterns(part: Any) -> Iterator[str]:
    if isinstance(part, dict) and isinstance(part.get("pattern"), str):
        yield part["pattern"]
    for item in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _patterns(item)


def _words_of(error: Exception) -> str:
    """The library's message without its time and source line."""
    return re.sub(r"^\[[^\]]*\] \S+: ", "", str(error)).strip()[:500]
