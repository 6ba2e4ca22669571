"""The tokenizer: the real one, small ones, broken ones."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.chat import V4_PREVIEW, V41, Tokenizer, encode_prompt, texts
from dsv4.errors import CheckpointError, RequestError
from tests.chat.fuzz import tiny_tokenizer, tokenizer_json
from tests.chat.support import (
    FIXTURES,
    TOKENIZER_FILE,
    v4_tokenizer,
    v41_tokenizer,
    v41_tokenizer_text,
)

ALPHABET = sorted(json.loads(TOKENIZER_FILE.read_text(encoding="utf-8"))["model"]["vocab"])
BYTES = [char for char in ALPHABET if len(char) == 1]
NEEDED = [
    texts.BOS, texts.EOS, texts.USER, texts.ASSISTANT, texts.THINK_OPEN, texts.THINK_CLOSE,
]  # fmt: skip


def test_real_tokenizer_is_the_published_one() -> None:
    digest = hashlib.sha256(TOKENIZER_FILE.read_bytes()).hexdigest()
    assert digest == "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
    assert v4_tokenizer().vocab_size == 129_280


def test_derived_v41_tokenizer_is_the_published_one() -> None:
    data = v41_tokenizer_text().encode()
    assert len(data) == 6_367_257
    digest = hashlib.sha256(data).hexdigest()
    assert digest == "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
    assert v41_tokenizer().vocab_size == 129_280


@pytest.mark.parametrize("name", ["v4", "v4.1"])
def test_special_ids(name: str) -> None:
    tokenizer = v4_tokenizer() if name == "v4" else v41_tokenizer()
    expected = json.loads((FIXTURES / "special_tokens.json").read_text(encoding="utf-8"))[name]
    for marker, token_id in expected.items():
        assert tokenizer.marker_id(marker) == token_id
        assert tokenizer.decode([token_id]) == marker
    special = tokenizer.special
    assert (special.bos, special.eos, special.user, special.assistant) == (0, 1, 128803, 128804)
    assert (special.think_open, special.think_close, special.dsml) == (128821, 128822, 128825)
    assert special.system == (128799 if name == "v4.1" else None)
    assert special.tasks["action"] == 128829
    assert len(special.tasks) == 6
    assert sorted(special.grounding.values()) == list(range(129271, 129279))


def test_stop_ids() -> None:
    v4_stops = {0, 1, 128803, 128804, 128828}
    assert v4_tokenizer().stop_ids(V4_PREVIEW) == v4_stops
    assert v41_tokenizer().stop_ids(V41) == {*v4_stops, 128799}
    with pytest.raises(CheckpointError, match="System"):
        v4_tokenizer().stop_ids(V41)


@pytest.mark.parametrize("name", ["v4", "v4.1"])
@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_no_message_can_write_a_marker(name: str, role: str) -> None:
    """Each special-token string in each place where a client writes text."""
    tokenizer, dialect = (v4_tokenizer(), V4_PREVIEW) if name == "v4" else (v41_tokenizer(), V41)
    listed = json.loads((FIXTURES / "special_tokens.json").read_text(encoding="utf-8"))[name]

    def ids_with(text: str) -> list[int]:
        call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({text: text})}}
        content = dict.fromkeys(("user", "system", "tool", "assistant"), "x")
        content[role] = text
        messages = [
            {"role": "system", "content": content["system"]},
            {"role": "user", "content": content["user"]},
            {
                "role": "assistant",
                "content": content["assistant"],
                "reasoning_content": content["assistant"],
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": "c", "content": content["tool"]},
        ]
        tool = {"function": {"name": "f", "description": text, "parameters": {"x": text}}}
        return encode_prompt(messages, dialect=dialect, tools=[tool]).ids(tokenizer)

    plain = [i for i in ids_with("x") if tokenizer.is_marker(i)]
    for marker in listed:
        found = [i for i in ids_with(marker) if tokenizer.is_marker(i)]
        if role == "assistant" and marker in texts.GROUNDING:
            assert len(found) == len(plain) + 2  # once in reasoning, once in the answer
        else:
            assert found == plain, marker


def test_specials_by_spelling_only_on_request() -> None:
    text = f"{texts.USER}hi{texts.ASSISTANT}"
    tokenizer = v4_tokenizer()
    assert tokenizer.encode_with_specials(text) == [128803, *tokenizer.encode("hi"), 128804]
    assert not set(tokenizer.encode(text)) & {128803, 128804}


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=60))
def test_encode_decode_round_trip(text: str) -> None:
    tokenizer = v4_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 129_279), max_size=40))
def test_incremental_equals_whole_for_any_ids(ids: list[int]) -> None:
    """Any ids, also such as make broken UTF-8: nothing reordered, nothing lost."""
    tokenizer = v4_tokenizer()
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 127_999), max_size=40))
def test_decode_equals_the_library(ids: list[int]) -> None:
    backend = v4_tokenizer()._backend
    assert v4_tokenizer().decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_half_a_character_waits_and_then_shows() -> None:
    tokenizer = v4_tokenizer()
    first, second = tokenizer.encode("🤭")[-2:]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(first) == ""
    assert detokenizer.push(second) == "🤭"
    detokenizer.push(first)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_unknown_ids_are_visible() -> None:
    assert v4_tokenizer().decode([129_280, -1, 1 << 40]) == "\ufffd\ufffd\ufffd"


def test_small_tokenizer_with_its_own_ids() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.special.bos != 0
    assert tokenizer.vocab_size == len(set(tokenizer.special.grounding.values())) + 256 + 17
    prompt = encode_prompt(
        [{"role": "user", "content": "longer than the file's truncation"}], dialect=V41
    )
    ids = prompt.ids(tokenizer)
    assert tokenizer.decode(ids) == prompt.text
    assert ids[0] == tokenizer.special.bos


def test_small_tokenizer_without_optional_markers() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(BYTES, NEEDED))
    assert tokenizer.special.dsml is None
    assert len(tokenizer.stop_ids(V4_PREVIEW)) == 4
    user = [{"role": "user", "content": "<｜ref｜> in user text"}]
    assert encode_prompt(user, dialect=V4_PREVIEW).ids(tokenizer)
    told = [*user, {"role": "assistant", "content": "<｜ref｜>"}, *user]
    assert encode_prompt(told, dialect=V4_PREVIEW).ids(tokenizer)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="｜DSML｜"):
        encode_prompt(user, dialect=V4_PREVIEW, tools=tools).ids(tokenizer)


@pytest.mark.parametrize("missing", NEEDED)
def test_missing_marker_is_named(missing: str) -> None:
    markers = [marker for marker in NEEDED if marker != missing]
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_str(tokenizer_json(BYTES, markers))
    assert missing in str(caught.value)


def test_base_vocabulary_must_not_spell_a_marker() -> None:
    content = json.loads(tokenizer_json(BYTES, NEEDED))
    content["model"]["vocab"]["<think>"] = 256 + NEEDED.index(texts.THINK_OPEN)
    content["model"]["ignore_merges"] = True  # takes any word of the vocabulary as it is
    with pytest.raises(CheckpointError, match="inject"):
        Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]", "no 'model' object"),
        ('{"model": {}}', "added_tokens"),
        ('{"model": {}, "added_tokens": [{"id": "1"}]}', "added_tokens"),
        ('{"model": {}, "added_tokens": [], "decoder": {"type": "WordPiece"}}', "ByteLevel"),
        ('{"model": {}, "added_tokens": [], "decoder": {"type": "ByteLevel"}}', "refuses"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_broken_files(text: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.from_str(text)


def test_missing_and_undecodable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="UTF-8"):
        Tokenizer.from_folder(tmp_path)
