"""Parses model output into reasoning, answer and tool calls, whole or as a stream.

Markers are recognised as special tokens, or by their spelling where only text is available.
However the output is split into pieces, the joined result is the same, and nothing that was sent is
retracted.
"""

import codecs
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsv4.chat import texts
from dsv4.chat.dialect import Dialect
from dsv4.chat.lexer import MarkerLexer
from dsv4.chat.output.block import CallBlock
from dsv4.chat.output.stops import StopMatcher
from dsv4.chat.output.tags import TAG_CLOSE, TAG_OPEN, Delta, Outcome
from dsv4.chat.tokenizer import Tokenizer

__all__ = ["Delta", "OutputParser", "Parsed", "ParsedCall", "new_call_id", "parse"]

_MAX_PIECE_CHARS = 2048


class ParsedCall(NamedTuple):
    name: str
    arguments: str  # JSON text; incomplete only if the length limit cut it


@dataclass(frozen=True)
class Parsed:
    reasoning: str
    content: str
    tool_calls: tuple[ParsedCall, ...]
    finish_reason: str  # stop, length or tool_calls
    stop_sequence: str | None = None
    # Markup that could not be parsed: it was returned as text, or is in `unparsed`.
    malformed: bool = False
    unparsed: str = ""  # text inside or after a block of calls that belongs to no call


def new_call_id(position: int) -> str:
    """An id for a call: its index first, so ids sort like calls; the rest is random."""
    return f"call_{position:02d}_{secrets.token_hex(12)}"


def end_markers(dialect: Dialect) -> tuple[str, ...]:
    """The markers that end an assistant's turn."""
    markers = (texts.EOS, texts.BOS, texts.USER, texts.ASSISTANT, texts.LATEST_REMINDER)
    return (*markers, texts.SYSTEM) if dialect.is_v41 else markers


class OutputParser:
    """Push tokens or text, read deltas, finish, read `result`.

    `tools` maps each tool the model may call to its property names; empty or None makes markup
    ordinary text unless `tools_active` says otherwise. `start` is where the prompt left off, and
    `continued` says that the client wrote the beginning of that part (`Prompt.parser` sets all
    of these). With `keeps_newlines` an answer may begin with them, as a guide may ask.
    `ended` turns true at an end marker or stop string: what follows is ignored.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        tokenizer: Tokenizer | None = None,
        start: Literal["reasoning", "answer", "block"] = "reasoning",
        continued: bool = False,
        tools: Mapping[str, frozenset[str]] | None = None,
        tools_active: bool | None = None,
        stop: Sequence[str] = (),
        keeps_newlines: bool = False,
    ) -> None:
        self._tools = tools or {}
        self._tools_active = bool(self._tools) if tools_active is None else tools_active
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end_markers = frozenset(end_markers(dialect))
        self._lexer = MarkerLexer(
            (texts.THINK_OPEN, texts.THINK_CLOSE, texts.DSML, *end_markers(dialect))
        )
        self._stops = StopMatcher(stop)
        self._mode: str = start  # reasoning, answer, block, closer (a stray one), done
        self._return_mode = "answer"
        self._keeps_newlines = keeps_newlines
        self._at_start = not continued and not (start == "answer" and keeps_newlines)
        self._buffered = ""  # `<` or `</`, which may belong to a tag
        self._num_newlines = 0  # held, because newlines before a marker are dropped
        self._block: CallBlock | None = None
        if start == "block":
            self._block = CallBlock(self._tools, first_index=0, already_open=True)
        self._deltas: list[Delta] = []
        self._text: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[tuple[str, list[str]]] = []
        self._unparsed: list[str] = []
        self._malformed = False
        self._stop_sequence: str | None = None
        self._finish_reason: str | None = None
        self.ended = False

    def push_tokens(self, ids: Iterable[int]) -> list[Delta]:
        assert self._tokenizer is not None, "tokens need a tokenizer"
        for token_id in ids:
            if self.ended:
                break
            data = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_marker(token_id):
                self._take_text(self._decoder.decode(b"", final=True))
                self._decoder.reset()
                self._take_marker(data.decode())
            else:
                self._take_text(self._decoder.decode(data))
        return self._take_deltas()

    def push_text(self, text: str) -> list[Delta]:
        # States pass on the rest of a piece by copying it, so pieces have to be short.
        for at in range(0, len(text), _MAX_PIECE_CHARS):
            for piece, is_marker in self._lexer.push(text[at : at + _MAX_PIECE_CHARS]):
                if self.ended:
                    return self._take_deltas()
                if is_marker:
                    self._take_marker(piece)
                else:
                    self._take_text(piece)
        return self._take_deltas()

    def finish(self, reason: Literal["stop", "length"] = "stop") -> list[Delta]:
        """The output is over; `reason` is ignored where an end marker or stop string ended it."""
        if not self.ended:
            self._take_text(self._decoder.decode(b"", final=True))
            tail = self._lexer.finish()
            if not any(tag.startswith(self._buffered + tail) for tag in (TAG_OPEN, TAG_CLOSE)):
                self._take_text(tail)
                tail = ""
            self._end(cut=reason == "length", tail=tail)
        if self._finish_reason is None:
            self._finish_reason = "tool_calls" if self._calls else "stop"
        return self._take_deltas()

    @property
    def part(self) -> str:
        """What the next text belongs to: reasoning, answer, or calls."""
        return self._mode

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._stop_sequence

    @property
    def result(self) -> Parsed:
        assert self._finish_reason is not None, "finish() comes first"
        unparsed = "".join(self._unparsed).strip()
        return Parsed(
            reasoning="".join(self._text["reasoning"]),
            content="".join(self._text["content"]),
            tool_calls=tuple(ParsedCall(name, "".join(parts)) for name, parts in self._calls),
            finish_reason=self._finish_reason,
            stop_sequence=self._stop_sequence,
            malformed=self._malformed or bool(unparsed),
            unparsed=unparsed,
        )

    # Input: text and markers.

    def _take_text(self, text: str) -> None:
        if not text:
            return
        text = self._buffered + text
        self._buffered = ""
        if self._tools_active:
            self._buffered = "</" if text.endswith("</") else "<" if text.endswith("<") else ""
            text = text[: len(text) - len(self._buffered)]
        self._route(text)

    def _take_marker(self, marker: str) -> None:
        held, self._buffered = self._buffered, ""
        if marker == texts.DSML and held and not self.ended:
            self._take_tag(is_opening=held == "<")
            return
        self._route(held)
        if self.ended:
            return
        if marker in self._end_markers:
            self._end(cut=False)
        elif marker in (texts.THINK_OPEN, texts.THINK_CLOSE):
            self._take_think(marker)
        elif marker == texts.DSML or marker in texts.GROUNDING:
            self._route(marker)

    def _take_think(self, marker: str) -> None:
        if self._mode == "closer":
            self._mode = self._return_mode
        if self._mode == "block":
            assert self._block is not None
            if not self._block.retract():
                self._route(marker)  # a value may mention thinking
                return
            self._after_block("")
        if self._mode == "reasoning" and marker == texts.THINK_CLOSE:
            self._num_newlines = 0
            self._mode, self._at_start = "answer", not self._keeps_newlines
        elif self._mode == "answer" and marker == texts.THINK_OPEN:
            self._release()
            self._mode, self._at_start = "reasoning", True

    def _take_tag(self, *, is_opening: bool) -> None:
        if self._mode == "block":
            assert self._block is not None
            taken = self._block.open() if is_opening else self._block.close()
            self._after_block("")
            if taken or self.ended:
                return
        if self._mode == "closer":
            self._mode = self._return_mode
        if is_opening:
            self._open_block()
        else:
            self._malformed = True
            self._return_mode, self._mode = self._mode, "closer"
            self._unparsed.append(TAG_CLOSE)

    def _open_block(self) -> None:
        if self._mode == "answer":
            self._hold_newlines(self._stops.finish())
        before = "\n" * self._num_newlines
        self._num_newlines = 0
        self._return_mode, self._mode = self._mode, "block"
        self._block = CallBlock(self._tools, first_index=len(self._calls), before=before)

    # Routing of text.

    def _route(self, text: str) -> None:
        while text and not self.ended:
            if self._mode == "block":
                assert self._block is not None
                text = self._after_block(self._block.push(text))
            elif self._mode == "closer":
                tag, end, text = text.partition(">")
                self._unparsed.append(tag + end)
                if end:
                    self._mode = self._return_mode
            else:
                self._take_prose(text)
                text = ""

    def _take_prose(self, text: str) -> None:
        if self._mode == "done":
            self._unparsed.append(text)
            return
        if self._at_start:
            text = text.lstrip("\n")
            if not text:
                return
            self._at_start = False
        if self._mode == "reasoning":
            self._hold_newlines(text)
            return
        text, self._stop_sequence = self._stops.push(text)
        self._hold_newlines(text)
        if self._stop_sequence is not None:
            self._buffered = ""  # it came after the stop string
            self._end(cut=False)

    def _hold_newlines(self, text: str) -> None:
        """Emit text except trailing newlines: a marker may follow and drop them."""
        body = text.rstrip("\n")
        if body:
            self._send("\n" * self._num_newlines + body)
            self._num_newlines = 0
        self._num_newlines += len(text) - len(body)
        if self._mode == "answer" and not self._tools_active:
            self._release_newlines()

    def _release(self) -> None:
        """Emit everything buffered; no marker can claim it any more."""
        if self._mode == "answer":
            self._hold_newlines(self._stops.finish())
        self._release_newlines()

    def _release_newlines(self) -> None:
        self._send("\n" * self._num_newlines)
        self._num_newlines = 0

    def _send(self, text: str) -> None:
        if text:
            self._add(Delta("reasoning" if self._mode == "reasoning" else "content", text))

    def _after_block(self, rest: str) -> str:
        """Collect the block's results; `rest` is the text after its end."""
        block = self._block
        assert block is not None
        for delta in block.take_deltas():
            self._add(delta)
        if block.outcome is Outcome.OPEN:
            return rest
        self._mode = "done" if block.num_calls else self._return_mode
        if block.outcome is Outcome.CLOSED:
            self._unparsed.append(block.skipped)
            return rest
        self._take_back(block)
        if block.rest is not None and not self.ended:
            self._open_block()
            return block.rest
        return rest

    def _take_back(self, block: CallBlock) -> None:
        self._malformed = True
        self._route(block.given_back)

    def _add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if delta.kind == "call":
            self._calls.append((delta.text, []))
        elif delta.kind == "arguments":
            self._calls[delta.call_index][1].append(delta.text)
        else:
            self._text[delta.kind].append(delta.text)

    def _end(self, *, cut: bool, tail: str = "") -> None:
        """An end marker, a stop string or the end of the input; `tail` may be half a tag."""
        held, self._buffered = self._buffered + tail, ""
        if self._mode == "block":
            self._end_block(held, cut=cut)
        else:
            self._route(held)
        if self.ended:
            return  # what was held completed a stop string
        if self._mode in ("reasoning", "answer"):
            self._release()
        self.ended = True
        if cut:
            self._finish_reason = "length"

    def _end_block(self, held: str, *, cut: bool) -> None:
        block = self._block
        assert block is not None
        block.finish(held, cut=cut)
        for delta in block.take_deltas():
            self._add(delta)
        self._mode = "done" if block.num_calls else self._return_mode
        if block.outcome is Outcome.TEXT:
            self._take_back(block)
        else:
            self._unparsed.append(block.skipped)

    def _take_deltas(self) -> list[Delta]:
        """Return what is new, with adjacent pieces of one kind merged."""
        deltas, self._deltas = self._deltas, []
        if len(deltas) < 2:
            return deltas
        joined: list[Delta] = []
        for (kind, call_index), group in itertools.groupby(
            deltas, key=lambda delta: (delta.kind, delta.call_index)
        ):
            if kind == "call":
                joined += group
            else:
                joined.append(Delta(kind, "".join(delta.text for delta in group), call_index))
        return joined


def parse(
    output: str | Sequence[int],
    dialect: Dialect,
    *,
    finish: Literal["stop", "length"] = "stop",
    tokenizer: Tokenizer | None = None,
    start: Literal["reasoning", "answer", "block"] = "reasoning",
    continued: bool = False,
    tools: Mapping[str, frozenset[str]] | None = None,
    tools_active: bool | None = None,
    stop: Sequence[str] = (),
) -> Parsed:
    """Parse a whole output, given as text or as token ids."""
    parser = OutputParser(
        dialect,
        tokenizer=tokenizer,
        start=start,
        continued=continued,
        tools=tools,
        tools_active=tools_active,
        stop=stop,
    )
    if isinstance(output, str):
        parser.push_text(output)
    else:
        parser.push_tokens(output)
    parser.finish(finish)
    return parser.result
