"""Guided output: token masks that keep an answer within its guide.

The grammar library (xgrammar) is an optional extra. Guides are compiled in another process
(`guide_compiler.py`), so a step never waits for one. Compiled guides are cached for later requests.
"""

import importlib.util
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import RequestError
from dsv4.request import Guide
from dsv4.sampling.guide_compiler import CompilerProcess, PendingGuide

log = logging.getLogger(__name__)

MAX_COMPILED = 64  # cached guides
MAX_COMPILED_BYTES = 64 * 2**20  # per guide

NO_TEXT = b"\xff"  # a token that no text matches but a structure can name
_WORD_BITS = 32
_BOUNDED_CHARACTER = r"[^\"\\\r\n]"  # as the library writes it
_JSON_CHARACTER = r"[^\0-\x1f\"\\\r\n]"


class Matcher:
    """One answer's position in its guide."""

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

    def allowed(self, drafts: list[int]) -> list[int]:
        """The leading drafts that the guide accepts; the answer's position does not change."""
        found: list[int] = []
        num_tried, is_active = 0, self._is_active
        for token in drafts:
            if not is_active:
                is_active = token == self._after_id
            elif self._matcher.is_terminated() or not self._matcher.accept_token(token):
                break
            else:
                num_tried += 1
            found.append(token)
        if num_tried:
            self._matcher.rollback(num_tried)
        return found

    def replacement(self, token_id: int, ends: Collection[int]) -> int:
        """The token to use instead of a sampled one: an end marker before a guide that `must_come`
        becomes the token that starts it."""
        if self._is_active or not self._must_come or token_id not in ends:
            return token_id
        assert self._after_id is not None
        return self._after_id

    def accept(self, token_id: int) -> bool:
        """Advance by a token that the mask allowed; returns whether it ends the answer."""
        if not self._is_active:
            self._is_active = token_id == self._after_id
            return False
        self.is_stuck = self.is_stuck or not self._matcher.accept_token(token_id)
        return bool(self._matcher.is_terminated())


class Guides:
    """Compiled guides of one tokenizer. `vocabulary`: the bytes of each token, b"" for markers
    that are never allowed, NO_TEXT for one that only a structure can name."""

    def __init__(self, vocabulary: Sequence[bytes], stop_ids: Sequence[int]) -> None:
        self.vocab_size = len(vocabulary)
        self._vocabulary = list(vocabulary)
        self._stop_ids = sorted(stop_ids)
        self._process = CompilerProcess(self._vocabulary, self._stop_ids)
        self._known: OrderedDict[tuple[str, str], PendingGuide] = OrderedDict()

    def compile(self, guide: Guide) -> PendingGuide:
        """Returns without waiting; equal guides are compiled once."""
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(
                "guided output needs the xgrammar library; install it with pip install "
                "'dsv4[guided]', or leave out the guide"
            )
        _check_patterns(guide)
        key = (guide.kind, guide.text)
        found = self._known.get(key)
        if found is None or found.is_ours:
            found = PendingGuide(guide.kind, guide.text)
            self._process.submit(found)
            self._known[key] = found
        found.num_users += 1
        self._known.move_to_end(key)
        for old in [old for old, job in self._known.items() if job.is_ready][:-MAX_COMPILED]:
            del self._known[old]
        return found

    def give_up(self, job: PendingGuide) -> None:
        """A request that waited for this guide has ended."""
        job.num_users -= 1
        if job.num_users == 0 and not job.is_ready:
            del self._known[job.kind, job.text]
            self._process.cancel(job)

    def close(self) -> None:
        self._process.close()

    def matcher(self, compiling: PendingGuide, guide: Guide) -> Matcher:
        return Matcher(compiling.result(), self.vocab_size, guide)


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    if kind == "regex":
        grammar = compiler.compile_regex(text)
    elif kind == "choice":
        choices = " | ".join(_literal(choice) for choice in json.loads(text))
        grammar = compiler.compile_grammar(f"root ::= {choices}")
    elif kind == "grammar":
        grammar = compiler.compile_grammar(text)
    elif kind == "structure":
        tag = {"type": "structural_tag", "format": _with_grammars(json.loads(text))}
        grammar = compiler.compile_structural_tag(json.dumps(tag))
    else:
        schema = text or '{"type": "object", "additionalProperties": true}'
        grammar = compiler.compile_grammar(_json_grammar(schema))
    if grammar.memory_size_bytes > MAX_COMPILED_BYTES:
        raise RequestError(
            f"it takes {grammar.memory_size_bytes} bytes compiled, expected at most "
            f"{MAX_COMPILED_BYTES}; simplify it"
        )
    return grammar


def _json_grammar(schema: str) -> str:
    """A schema as a grammar with one way to write each value; otherwise white space is unbounded.

    The library allows control characters in strings of limited length; JSON does not.
    """
    import xgrammar

    text = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
    return text.replace(_BOUNDED_CHARACTER, _JSON_CHARACTER)


def _with_grammars(part: Any) -> Any:
    """A structure with its JSON schemas replaced by our grammars."""
    if isinstance(part, list):
        return [_with_grammars(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema":
        return {"type": "grammar", "grammar": _json_grammar(json.dumps(part["json_schema"]))}
    return {name: _with_grammars(item) for name, item in part.items()}


def _literal(text: str) -> str:
    """A text as a literal of the grammar notation."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'


def _check_patterns(guide: Guide) -> None:
    """Refuse look-around in a schema's patterns: the library would drop it silently."""
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


def words_of(error: Exception) -> str:
    """The library's message without its time and source line."""
    return re.sub(r"^\[[^\]]*\] \S+: ", "", str(error)).strip()[:500]
