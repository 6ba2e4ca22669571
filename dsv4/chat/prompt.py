"""A prompt as a list of segments, and the writer that builds it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dsv4.chat import jsontext, texts
from dsv4.chat.dialect import Dialect
from dsv4.chat.fields import MAX_TEXT_CHARS, fail
from dsv4.chat.lexer import split_markers
from dsv4.chat.messages import Tool, ToolCall
from dsv4.chat.output.parse import OutputParser
from dsv4.chat.tokenizer import Tokenizer

# Markers inside our own fixed texts, where they are control tokens and not prose.
_FIXED_TEXT_MARKERS = (texts.DSML, texts.THINK_OPEN, texts.THINK_CLOSE)


class Segment(NamedTuple):
    text: str
    is_special: bool


class Start(NamedTuple):
    """What the first generated token belongs to; `continued` if the client wrote its start."""

    state: Literal["reasoning", "answer", "block"]
    continued: bool = False


@dataclass(frozen=True)
class Prompt:
    segments: tuple[Segment, ...]
    start: Start
    tools: tuple[Tool, ...]  # those the model may call; none: markup in the output is text
    dialect: Dialect

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids. Plain segments never produce a marker's id, even if they spell it."""
        ids: list[int] = []
        for text, is_special in self.segments:
            if not is_special:
                ids += tokenizer.encode(text)
            elif text in texts.GROUNDING and not tokenizer.has_marker(text):
                ids += tokenizer.encode(text)  # came from the client's text, so it may stay text
            else:
                ids.append(tokenizer.marker_id(text))
        return ids

    def parser(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        stop: Sequence[str] = (),
        keeps_newlines: bool = False,
    ) -> OutputParser:
        """A parser for the output after this prompt. Text input needs no tokenizer."""
        return OutputParser(
            self.dialect,
            tokenizer=tokenizer,
            start=self.start.state,
            continued=self.start.continued,
            tools={tool.name: tool.properties for tool in self.tools},
            stop=stop,
            keeps_newlines=keeps_newlines,
        )


class PromptWriter:
    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._segments: list[Segment] = []
        self._plain: list[str] = []
        self._num_chars = 0

    def special(self, marker: str) -> None:
        self._close_plain()
        self._segments.append(Segment(marker, True))

    def plain(self, text: str) -> None:
        if text:
            self._plain.append(text)
            self._num_chars += len(text)

    def assistant_text(self, text: str) -> None:
        """Model text, in which special tokens mark places in an image."""
        self._mixed(text, texts.GROUNDING)

    def fixed(self, text: str) -> None:
        """Our own instruction text, whose markers are control tokens."""
        self._mixed(text, _FIXED_TEXT_MARKERS)

    def finish(self, start: Start, tools: tuple[Tool, ...]) -> Prompt:
        self._close_plain()
        if self._num_chars > MAX_TEXT_CHARS:
            fail(
                "messages",
                f"{self._num_chars} characters in all",
                f"at most {MAX_TEXT_CHARS}; send a shorter conversation",
            )
        return Prompt(tuple(self._segments), start, tools, self.dialect)

    def _mixed(self, text: str, markers: Sequence[str]) -> None:
        for piece, is_marker in split_markers(text, markers):
            if is_marker:
                self.special(piece)
            else:
                self.plain(piece)

    def _close_plain(self) -> None:
        # Adjacent texts become one segment: the tokenizer must see them in one piece.
        if self._plain:
            self._segments.append(Segment("".join(self._plain), False))
            self._plain = []


def write_tools(out: PromptWriter, tools: Sequence[Tool], *, added: bool) -> None:
    """The tools block, or the short list of tools that join a running conversation."""
    schemas = "\n".join(jsontext.dump(tool.schema) for tool in tools)
    if added:
        out.plain(texts.ADDED_TOOLS_V41.replace("{schemas}", schemas))
        return
    text = texts.TOOLS_BLOCK
    for field, tag in _tags(out.dialect).items():
        text = text.replace(field, tag)
    before, _, after = text.partition("{schemas}")
    out.plain("\n\n")
    out.fixed(before)
    out.plain(schemas)
    out.fixed(after)


def write_calls(out: PromptWriter, calls: Iterable[ToolCall]) -> None:
    """Calls of an earlier turn, in the markup that the model itself writes."""
    dialect = out.dialect
    out.plain("\n\n")
    _open_tag(out, dialect.block_tag)
    for call in calls:
        out.plain("\n")
        _open_tag(out, dialect.invoke_tag, f' name="{call.name}"')
        out.plain("\n")
        for place, (name, value, is_string) in enumerate(_parameters(call, dialect)):
            out.plain("\n" if place else "")
            flag = "true" if is_string else "false"
            _open_tag(out, dialect.parameter_tag, f' name="{name}" string="{flag}"')
            out.plain(value)
            _close_tag(out, dialect.parameter_tag)
        out.plain("\n")
        _close_tag(out, dialect.invoke_tag)
    out.plain("\n")
    _close_tag(out, dialect.block_tag)


def _tags(dialect: Dialect) -> dict[str, str]:
    return {
        "{block}": dialect.block_tag,
        "{invoke}": dialect.invoke_tag,
        "{parameter}": dialect.parameter_tag,
    }


def _open_tag(out: PromptWriter, tag: str, attributes: str = "") -> None:
    out.plain("<")
    out.special(texts.DSML)
    out.plain(f"{tag}{attributes}>")


def _close_tag(out: PromptWriter, tag: str) -> None:
    out.plain("</")
    out.special(texts.DSML)
    out.plain(f"{tag}>")


def _parameters(call: ToolCall, dialect: Dialect) -> list[tuple[str, str, bool]]:
    """(name, text, is_string) of each argument; text that is not a JSON object stays whole."""
    try:
        arguments = jsontext.load(call.arguments)
        if dialect.is_v41 and isinstance(arguments, str):
            arguments = jsontext.load(arguments)  # some clients encode twice
        if not isinstance(arguments, dict):
            raise ValueError("not an object")
        if any(map(jsontext.has_surrogate, [*arguments, jsontext.dump(arguments)])):
            raise ValueError("half of a surrogate pair cannot be written")
        return [
            (name, value, True) if isinstance(value, str) else (name, jsontext.dump(value), False)
            for name, value in arguments.items()
        ]
    except ValueError:
        return [("arguments", call.arguments, True)]
