"""Guided tool calls: whatever is written under the guide is a call that fits its tool.

The schemas come from pydantic models, and pydantic itself says whether the arguments fit.
"""

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from dsv4.chat import V4_OFFICIAL, V41, Dialect, OutputParser, Parsed, Tokenizer
from dsv4.chat.messages import Tool, read_tools
from dsv4.chat.output.call_grammar import CallGrammar, answer_or_calls
from dsv4.errors import RequestError
from dsv4.request import Guide
from dsv4.sampling import NO_TEXT, Guides
from tests.models import BYTE_TOKENIZER

Short = Annotated[str, Field(max_length=3)]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: Short
    child: "Person | None" = None


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    title: Annotated[str, Field(min_length=2, max_length=5)]
    kind: Literal["small", "lar<ge", "</x"]
    code: Annotated[str, Field(pattern=r"^[A-C]{2}-\d$")]
    count: Annotated[int, Field(ge=1, le=99)]
    either: Short | bool | None
    mixed: Literal["yes", 7]
    owner: Person
    words: Annotated[list[Short], Field(max_length=3)] = []
    note: Short | None = None


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


MODELS: dict[str, type[BaseModel]] = {"make_plan": Plan, "add_person": Person, "wait": Nothing}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}
        for name, model in MODELS.items()
    ],
    "tools",
    as_received=False,
)


class Writer:
    """Writes tokens that a guide allows, at random, with a liking for what ends things."""

    def __init__(self, folder: Path) -> None:
        shutil.copy(BYTE_TOKENIZER, folder / "tokenizer.json")
        self.tokenizer = Tokenizer.from_folder(folder)
        special, count = self.tokenizer.special, self.tokenizer.vocab_size
        assert special.dsml is not None
        self.marker, self.end = special.dsml, special.eos
        is_marker, of = self.tokenizer.is_marker, self.tokenizer.token_bytes
        vocabulary = [b"" if is_marker(token) else of(token) for token in range(count)]
        # no half characters: the library lets surrogates and overlong spellings pass
        odd = [bytes([byte]) for byte in (0xC0, 0xC1, *range(0xE0, 0x100))]
        vocabulary = [b"" if text in odd else text for text in vocabulary]
        vocabulary[self.marker] = NO_TEXT
        self.guides = Guides(vocabulary, [self.end])
        closing = (*b'</>"]}', *b"\n")
        self.closing = {self.marker, self.end, *(vocabulary.index(bytes([b])) for b in closing)}

    def write(self, structure: Any, seed: int) -> list[int]:
        """One answer without its end; RequestError if the library cannot follow the structure."""
        guide = Guide("structure", structure)
        job = self.guides.compile(guide)
        assert job.done.wait(60)
        matcher = self.guides.matcher(job, guide)
        draw, ids = random.Random(seed), []
        while True:
            words = matcher.mask()
            assert words is not None, self.tokenizer.decode(ids)
            bits = [word & 0xFFFFFFFF for word in words.tolist()]
            allowed = [t for t in range(self.guides.vocab_size) if bits[t // 32] >> t % 32 & 1]
            closing = [token for token in allowed if token in self.closing]
            token = draw.choice(closing if closing and draw.random() < 0.7 else allowed)
            if matcher.accept(token):
                return ids
            ids.append(token)
            assert len(ids) < 20_000


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    return Writer(tmp_path_factory.mktemp("tokenizer"))


def calls_of(
    writer: Writer, tools: Sequence[Tool], dialect: Dialect = V4_OFFICIAL, **changes: bool
) -> CallGrammar:
    settings = {"is_strict": True, "is_parallel": True, **changes}
    return CallGrammar(tools, dialect, writer.marker, **settings)


def parsed(writer: Writer, ids: list[int], start: Any, dialect: Dialect = V4_OFFICIAL) -> Parsed:
    tools = {tool.name: tool.properties for tool in TOOLS}
    parser = OutputParser(dialect, tokenizer=writer.tokenizer, start=start, tools=tools)
    parser.push_tokens(ids)
    parser.finish("stop")
    assert not parser.result.malformed
    return parser.result


@pytest.mark.parametrize("dialect", [V4_OFFICIAL, V41])
def test_arguments_fit_their_tool(writer: Writer, dialect: Dialect) -> None:
    structure = calls_of(writer, TOOLS, dialect).block()
    names, counts = set(), set()
    for seed in range(12):
        result = parsed(writer, writer.write(structure, seed), "answer", dialect)
        assert result.content == ""
        for name, arguments in result.tool_calls:
            MODELS[name].model_validate_json(arguments)
            names.add(name)
        counts.add(len(result.tool_calls))
    assert names == set(MODELS)
    assert max(counts) > 1
    assert min(counts) == 1


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_one_call_from_its_name_on(writer: Writer, tool: Tool) -> None:
    structure = calls_of(writer, [tool], is_parallel=False).after_name(tool)
    encode = writer.tokenizer.encode
    opening = [*encode("<"), writer.marker, *encode(f'invoke name="{tool.name}">\n')]
    for seed in range(6):
        [(name, arguments)] = parsed(
            writer, opening + writer.write(structure, seed), "block"
        ).tool_calls
        MODELS[name].model_validate_json(arguments)


def test_an_answer_or_a_call(writer: Writer) -> None:
    """Both come about; whichever it is, it keeps to its own rule."""
    calls = calls_of(writer, TOOLS[1:], is_parallel=False)
    structure = answer_or_calls(Guide("choice", ["left", "right"]), calls)
    seen = set()
    for seed in range(12):
        result = parsed(writer, writer.write(structure, seed), "answer")
        assert (result.content in ("left", "right")) != bool(result.tool_calls)
        for name, arguments in result.tool_calls:
            MODELS[name].model_validate_json(arguments)
        seen.add(bool(result.tool_calls))
    assert seen == {True, False}


def test_the_marker_is_a_token_and_never_spelled(writer: Writer) -> None:
    """Its characters spelled with other tokens would be text to the parser."""
    guide = Guide("structure", calls_of(writer, TOOLS).block())
    job = writer.guides.compile(guide)
    assert job.done.wait(60)
    matcher = writer.guides.matcher(job, guide)
    for token in writer.tokenizer.encode("\n\n<"):
        matcher.accept(token)
    words = matcher.mask()
    assert words is not None
    allowed = [t for t in range(writer.guides.vocab_size) if words[t // 32] >> t % 32 & 1]
    assert allowed == [writer.marker]


ODD: dict[str, Any] = {
    "free text": {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]},
    "no schema": {},
    "anything": {"type": "object"},
    "an odd name": {"type": "object", "properties": {'a"b': {"type": "null"}}, "required": ['a"b']},
    "branches": {"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}}]},
    "empty value": {"type": "object", "properties": {"t": {}}, "required": ["t"]},
    "one empty text": {"type": "object", "properties": {"t": {"enum": [""]}}, "required": ["t"]},
    "format": {
        "type": "object",
        "properties": {"t": {"type": "string", "format": "date"}},
        "required": ["t"],
    },
}


@pytest.mark.parametrize("schema", ODD.values(), ids=ODD)
def test_odd_schemas(writer: Writer, schema: Any) -> None:
    structure = calls_of(writer, [a_tool(schema)], is_parallel=False).block()
    for seed in range(3):
        result = parsed(writer, writer.write(structure, seed), "answer")
        [(name, arguments)] = result.tool_calls
        assert name == "wait"
        value = json.loads(arguments)
        assert set(schema.get("required", [])) <= value.keys()
        if schema == ODD["format"]:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["t"])
        if schema == ODD["one empty text"]:
            assert value == {"t": ""}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"t": {"$ref": "#/$defs/no"}}},
        {"type": "object", "properties": {"t": {"type": "poem"}}, "required": ["t"]},
        {"type": "object", "properties": {"t": {}}, "required": 7},
        {"type": "object", "properties": {"t": {"type": "string", "pattern": 5}}},
        {"type": "object", "properties": {"t": {"type": "string", "pattern": "(?=a)b"}}},
        {"type": "object", "properties": {"t": {"type": "string", "maxLength": "x"}}},
    ],
)
def test_wrong_schemas_have_a_reason(writer: Writer, schema: Any) -> None:
    with pytest.raises(RequestError, match="guide"):
        writer.write(calls_of(writer, [a_tool(schema)]).block(), 0)


def a_tool(schema: Any) -> Tool:
    function = {"name": "wait", "parameters": schema}
    return read_tools([{"type": "function", "function": function}], "tools", as_received=False)[0]
