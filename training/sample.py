"""A conversation to learn from, and its tokens with a weight for each.

The text is what `dsv4.chat.encode_prompt` writes (tests compare token for token); it is written
anew here because training needs the weights and tens of thousands of conversations a second.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from dsv4.chat import V4_PREVIEW, Tokenizer, encode_prompt, texts
from training.shape import TOKENIZER

Message = dict[str, Any]

# weights are stored as hundredths in a byte
ANSWER, USER_TEXT, STORY, NOTHING = 100, 3, 30, 0
STRESSED, AROUND = 250, 25  # the one word of an answer that has to be looked up, and the rest


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("get_weather", "The weather in a city", "city"),
    _tool("calculator", "The value of an expression", "expression"),
    _tool("get_time", "The time in a city", "city"),
)


@dataclass(frozen=True)
class Sample:
    """`messages` end with the assistant turn to learn."""

    skill: str
    messages: tuple[Message, ...]
    mode: str = "chat"
    tools: tuple[int, ...] = ()  # numbers of TOOLS, in the order they are listed
    key: str = ""  # decides whether the sample is held out
    text_weight: int = USER_TEXT


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", stressed: str = "") -> Message:
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    return {**message, "stressed": stressed} if stressed else message


def call(name: str, argument: str, value: str, reasoning: str = "") -> Message:
    arguments = json.dumps({argument: value}, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    entry = {"id": "call_00", "type": "function", "function": function}
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": reasoning,
        "tool_calls": [entry],
    }


def result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_00", "content": text}


Segment = tuple[str, bool, int]  # text, whether it is a marker, weight


@cache
def _tools_segments(tools: tuple[int, ...]) -> tuple[Segment, ...]:
    prompt = encode_prompt(
        [user("x")], dialect=V4_PREVIEW, tools=[TOOLS[n] for n in tools], mode="chat"
    )
    segments = [(s.text, s.is_special) for s in prompt.segments]
    end = segments.index((texts.USER, True))
    return tuple((text, special, NOTHING) for text, special in segments[1:end])


def _call_segments(message: Message) -> list[Segment]:
    out: list[Segment] = [("\n\n<", False, ANSWER), (texts.DSML, True, ANSWER)]
    text = "tool_calls>\n<"
    for entry in message["tool_calls"]:
        function = entry["function"]
        out += [(text, False, ANSWER), (texts.DSML, True, ANSWER)]
        text = f'invoke name="{function["name"]}">\n<'
        for name, value in json.loads(function["arguments"]).items():
            out += [(text, False, ANSWER), (texts.DSML, True, ANSWER)]
            out.append((f'parameter name="{name}" string="true">{value}</', False, ANSWER))
            out.append((texts.DSML, True, ANSWER))
            text = "parameter>\n</"
        out += [(text, False, ANSWER), (texts.DSML, True, ANSWER)]
        text = "invoke>\n</"
    out += [(text, False, ANSWER), (texts.DSML, True, ANSWER), ("tool_calls>", False, ANSWER)]
    return out


def segments(sample: Sample) -> list[Segment]:
    """The whole conversation; only text the assistant writes has full weight."""
    out: list[Segment] = [(texts.BOS, True, NOTHING)]
    if sample.skill == "prose":
        out.append((sample.messages[-1]["content"], False, STORY))
        return [*out, (texts.EOS, True, STORY)]
    if sample.tools:
        out += _tools_segments(sample.tools)
    thinking = sample.mode == "thinking"
    users = [n for n, m in enumerate(sample.messages) if m["role"] != "assistant"]
    for place, message in enumerate(sample.messages):
        if message["role"] != "assistant":
            text = message["content"]
            if message["role"] == "tool":
                text = f"{texts.TOOL_RESULT_OPEN}{text}{texts.TOOL_RESULT_CLOSE}"
            out += [(texts.USER, True, NOTHING), (text, False, sample.text_weight)]
            continue
        out.append((texts.ASSISTANT, True, NOTHING))
        shown = thinking and (bool(sample.tools) or place > users[-1])
        # an earlier answer of a thinking conversation is not what the model would write now
        weight = ANSWER if shown or not thinking else NOTHING
        if shown:
            out.append((texts.THINK_OPEN, True, NOTHING))
            out.append((message.get("reasoning_content") or "", False, ANSWER))
        out.append((texts.THINK_CLOSE, True, ANSWER if shown else NOTHING))
        if message.get("stressed"):
            before, word, after = message["content"].rpartition(message["stressed"])
            out += [(before, False, AROUND), (word, False, STRESSED), (after, False, AROUND)]
        else:
            out.append((message["content"], False, weight))
        if message.get("tool_calls"):
            out += _call_segments(message)
        out.append((texts.EOS, True, weight))
    return out


class Encoder:
    """Segments to ids; caches the ids of every piece between two spaces."""

    _PIECES = re.compile(r" ?[^ ]+|^ $| $")

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or Tokenizer.from_file(TOKENIZER)
        self._known: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        if "  " in text:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        known = self._known
        for piece in self._PIECES.findall(text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self.tokenizer.encode(piece)
            ids += found
        return ids

    def count(self, text: str) -> int:
        return len(self.text(text))

    def sample(self, sample: Sample) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        weights: list[int] = []
        for text, special, weight in segments(sample):
            new = [self.tokenizer.marker_id(text)] if special else self.text(text)
            ids += new
            weights += [weight] * len(new)
        return ids, weights
