"""Random damaged outputs and the promises that hold for every one of them.

Shared by `scripts/fuzz_chat.py`, which runs it for as long as one likes, and by the tests, which
run it briefly and replay the corpus of cases that once failed.
"""

import json
import random
from typing import Any

from dsv4.chat import V4_PREVIEW, V41, OutputParser, Parsed, Tokenizer
from dsv4.chat import texts as fixed
from dsv4.chat.lexer import split_markers
from dsv4.chat.output.parse import end_markers

Case = dict[str, Any]

TOOLS = {
    "run": frozenset({"command"}),
    "get": frozenset({"a", "b"}),
    "ping": frozenset[str](),
    "ns::f": frozenset({"input"}),
}
_TAGS = [
    "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "<｜DSML｜ calls>", "</｜DSML｜ calls>",
    '<｜DSML｜invoke name="run">', '<｜DSML｜ invoke name="get">', '<｜DSML｜invoke name="nope">',
    '<｜DSML｜invoke name="ping"/>', "</｜DSML｜invoke>", "</｜DSML｜ invoke>",
    '<｜DSML｜parameter name="command" string="true">',
    '<｜DSML｜parameter name="a" string="false">',
    '<｜DSML｜ parameter name="arguments" string="false">', "</｜DSML｜parameter>",
    '<｜DSML｜ parameter name="input" string="true">', "</｜DSML｜ parameter>",
    '<｜DSML｜parameter name="x y">', "<｜DSML｜what>", '<｜DSML｜invoke name="">',
]  # fmt: skip
_PIECES = [
    "<", "</", ">", "/>", '"', "｜", "<｜", "｜DSML｜", "<｜DSML｜", "</｜DSML｜", "\n", "\n\n",
    " ", "{", "}", "[1, 2]", '{"a": 1}', '{"command": "ls"}', "null", "-1.5e3", '"s"', "NaN", "\\",
    'invoke name="', 'parameter name="', ' name="', "invoke", "param", 'string="false"',
    fixed.THINK_OPEN, fixed.THINK_CLOSE, fixed.THINK_OPEN, fixed.THINK_CLOSE, "<thin", "</thi",
    "é", "🤭", "日本", "e\u0301", "\x00", "\x1f", "\u2028", "STOP", "ST", "OP", "\ufffd",
]  # fmt: skip
_ENDS = [fixed.EOS, fixed.USER, fixed.BOS, fixed.SYSTEM, fixed.LATEST_REMINDER]


def tiny_tokenizer() -> Tokenizer:
    """One token for each byte and one for each marker, under ids of its own."""
    alphabet = [chr(byte) for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]]
    alphabet += [chr(0x100 + place) for place in range(256 - len(alphabet))]
    markers = [
        fixed.THINK_OPEN, fixed.THINK_CLOSE, fixed.DSML, *_ENDS, fixed.ASSISTANT,
        *fixed.GROUNDING, *fixed.TASKS.values(), fixed.IMAGE_V41, "<｜unused｜>",
    ]  # fmt: skip
    return Tokenizer.from_str(tokenizer_json(alphabet, markers))


def tokenizer_json(alphabet: list[str], markers: list[str]) -> str:
    added = [
        {
            "id": len(alphabet) + place,
            "content": marker,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": True,
            "special": False,
        }
        for place, marker in enumerate(markers)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0,
                           "direction": "Right"},
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": False},
            "model": {
                "type": "BPE",
                "vocab": {char: place for place, char in enumerate(alphabet)},
                "merges": [],
            },
        }
    )  # fmt: skip


def make_case(rng: random.Random) -> Case:
    pieces: list[str] = []
    for _ in range(rng.choice([3, 8, 20, 40])):
        kind = rng.random()
        if kind < 0.4:
            pieces.append(rng.choice(_TAGS))
        elif kind < 0.75:
            pieces.append(rng.choice(_PIECES))
        elif kind < 0.99:
            pieces.append(f"w{len(pieces)}")
        else:
            pieces.append(rng.choice(_ENDS))
    text = "".join(pieces)
    if rng.random() < 0.3:
        cut = rng.randint(0, len(text))
        text = text[:cut] if rng.random() < 0.5 else text[:cut] + text[cut + rng.randint(1, 9) :]
    start = rng.choice(["reasoning", "answer", "answer", "block"])
    return {
        "text": text,
        "v41": rng.random() < 0.5,
        "start": start,
        "continued": rng.random() < 0.1,
        "tools_active": start == "block" or rng.random() < 0.9,
        "finish": rng.choice(["stop", "stop", "length"]),
        "stop": rng.choice([[], [], [], ["STOP"], ["\n\n", "w3"], ["<"]]),
        "seed": rng.randint(0, 2**32),
    }


def new_parser(case: Case, tokenizer: Tokenizer | None = None) -> OutputParser:
    return OutputParser(
        V41 if case["v41"] else V4_PREVIEW,
        tokenizer=tokenizer,
        start=case["start"],
        continued=case["continued"],
        tools=TOOLS,
        tools_active=case["tools_active"],
        stop=case["stop"],
    )


def cut_at_random(items: Any, rng: random.Random) -> list[Any]:
    pieces = []
    at = 0
    while at < len(items):
        size = rng.choice([1, 1, 2, 3, 5, 8, 13, 50])
        pieces.append(items[at : at + size])
        at += size
    return pieces


def parse_text(case: Case, pieces: list[str]) -> Parsed:
    parser = new_parser(case)
    for piece in pieces:
        parser.push_text(piece)
    parser.finish(case["finish"])
    return parser.result


def parse_ids(case: Case, pieces: list[list[int]], tokenizer: Tokenizer) -> Parsed:
    parser = new_parser(case, tokenizer)
    for piece in pieces:
        parser.push_tokens(piece)
    parser.finish(case["finish"])
    return parser.result


def marker_ids(case: Case, tokenizer: Tokenizer) -> list[int]:
    """The output as tokens: markers as special tokens, all else as ordinary ones."""
    dialect = V41 if case["v41"] else V4_PREVIEW
    markers = (fixed.THINK_OPEN, fixed.THINK_CLOSE, fixed.DSML, *end_markers(dialect))
    ids: list[int] = []
    for piece, is_marker in split_markers(case["text"], markers):
        ids += [tokenizer.marker_id(piece)] if is_marker else tokenizer.encode(piece)
    return ids


def ends_in_half_marker(text: str) -> bool:
    """Such an end is taken for a cut tag in text; in tokens a marker has no halves."""
    return any(text.endswith(fixed.DSML[:size]) for size in range(1, len(fixed.DSML)))


def check(case: Case, tokenizer: Tokenizer, num_splits: int = 3) -> None:
    """Every promise of the parser, on one output."""
    rng = random.Random(case["seed"])
    whole = parse_text(case, [case["text"]])
    for _ in range(num_splits):
        pieces = cut_at_random(case["text"], rng)
        assert parse_text(case, pieces) == whole, f"cut as {pieces}"
    ids = marker_ids(case, tokenizer)
    for _ in range(0 if ends_in_half_marker(case["text"]) else num_splits):
        assert parse_ids(case, cut_at_random(ids, rng), tokenizer) == whole, "tokens differ"
    _check_deltas(case, whole, rng)
    _check_calls(case, whole)
    _check_nothing_lost(case, whole)


def _check_deltas(case: Case, whole: Parsed, rng: random.Random) -> None:
    """What was sent, joined, is the result: nothing is taken back or sent twice."""
    parser = new_parser(case)
    deltas = []
    for piece in cut_at_random(case["text"], rng):
        deltas += parser.push_text(piece)
    deltas += parser.finish(case["finish"])
    for kind, expected in (("reasoning", whole.reasoning), ("content", whole.content)):
        assert "".join(delta.text for delta in deltas if delta.kind == kind) == expected
    names = [delta.text for delta in deltas if delta.kind == "call"]
    assert names == [call.name for call in whole.tool_calls]
    for place, call in enumerate(whole.tool_calls):
        texts = [d.text for d in deltas if d.kind == "arguments" and d.call_index == place]
        assert "".join(texts) == call.arguments


def _check_calls(case: Case, whole: Parsed) -> None:
    for place, call in enumerate(whole.tool_calls):
        assert call.name.strip()
        is_cut = whole.finish_reason == "length" and place == len(whole.tool_calls) - 1
        if not is_cut:
            assert isinstance(json.loads(call.arguments, parse_constant=_refuse), dict)
    if whole.finish_reason == "tool_calls":
        assert whole.tool_calls
    if not case["tools_active"]:
        assert not whole.tool_calls
        assert not whole.malformed


def _check_nothing_lost(case: Case, whole: Parsed) -> None:
    """Each word turns up somewhere, unless the turn ended before it or in the middle of a tag."""
    ends = [case["text"].find(marker) for marker in (*_ENDS, fixed.ASSISTANT)]
    if any(end >= 0 for end in ends) or whole.stop_sequence or case["finish"] == "length":
        return
    shown = [whole.reasoning, whole.content, whole.unparsed]
    for call in whole.tool_calls:
        # A name may be written twice; both values count as shown.
        shown += [call.name, *_strings(json.loads(call.arguments, object_pairs_hook=list))]
    found = "\n".join(shown)
    for place, word in _words(case["text"]):
        if not _is_tag_name(case["text"][:place]):
            assert word in found, f"{word} is lost"


def _words(text: str) -> list[tuple[int, str]]:
    words = []
    for place in range(len(text)):
        end = place + 1
        while text[place] == "w" and end < len(text) and text[end] in "0123456789":
            end += 1
        if end > place + 1:
            words.append((place, text[place:end]))
    return words


def _is_tag_name(before: str) -> bool:
    """A block may have any name, so the first word behind a tag's marker is markup."""
    _, marker, tag = before.rpartition(fixed.DSML)
    return bool(marker) and ">" not in tag and len(tag.split()) <= (tag[-1:].strip() != "")


def _strings(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [text for member in value for text in _strings(member)]
    return [str(value)]


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")
