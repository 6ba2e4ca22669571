"""Guided output: every answer keeps to its guide, whatever the model would rather say."""

import importlib.util
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dsv4.sampling.guided
from dsv4 import Engine, SamplingParams
from dsv4.errors import RequestError
from dsv4.request import Completion, Guide, Request
from tests.models import write_quick_model

PROMPT = [3, 14, 15, 92]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["a", "b"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_quick_model(tmp_path_factory.mktemp("model"))
    return Engine.load(folder, device="cpu", max_context=400, max_sequences=4)


def answer(engine: Engine, guide: Guide, seed: int = 1, **changes: Any) -> Completion:
    params = {"max_tokens": 120, "temperature": 1.0, "seed": seed, "guide": guide, **changes}
    [completion] = engine.generate([PROMPT], SamplingParams(**params))
    return completion


def test_a_schema_is_kept_by_a_model_that_knows_nothing(engine: Engine) -> None:
    for seed in range(3):
        found = answer(engine, Guide("json_schema", SCHEMA), seed)
        assert found.finish_reason == "stop"
        value = json.loads(found.text)
        assert list(value) == ["name", "kind", "size"]
        assert len(value["name"]) <= 4
        assert value["kind"] in ("a", "b")
        assert 0 <= value["size"] <= 99


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d{2}", r"(yes|no), (é|ü|日本)!"])
def test_a_regular_expression_matches_the_whole_answer(engine: Engine, pattern: str) -> None:
    found = answer(engine, Guide("regex", pattern))
    assert found.finish_reason == "stop"
    assert re.fullmatch(pattern, found.text)


def test_a_choice(engine: Engine) -> None:
    choices = ["red", 'a "quoted" \\ word', "two\nlines", "größer 😀"]
    seen = {answer(engine, Guide("choice", choices), seed).text for seed in range(6)}
    assert seen <= set(choices)
    assert len(seen) > 1
    greedy = answer(engine, Guide("choice", tuple(choices[:1])), temperature=0.0)
    assert greedy.text == "red"


def test_any_object(engine: Engine) -> None:
    found = answer(engine, Guide("json_object"), logit_bias={ord("}"): 30.0})
    assert isinstance(json.loads(found.text), dict)


def test_reasoning_is_free_until_its_end(engine: Engine) -> None:
    """A bias brings the marker early; before it the text is anything, after it the choice."""
    assert engine.tokenizer is not None
    marker = engine.tokenizer.special.think_close
    guide = Guide("choice", ["left", "right"], after_id=marker)
    found = answer(engine, guide, logit_bias={marker: 5.0})
    place = found.token_ids.index(marker)
    tail = engine.tokenizer.decode(found.token_ids[place + 1 : -1])
    assert tail in ("left", "right")


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json_schema", SCHEMA),
        Guide("regex", r"[a-f]{3}-\d{2}"),
        Guide("choice", ["left", "right"]),
    ],
)
def test_an_end_inside_the_reasoning_begins_the_answer(engine: Engine, guide: Guide) -> None:
    """The model wants to end at once: the reasoning ends, the guide is kept all the same."""
    assert engine.tokenizer is not None
    marker, end = engine.tokenizer.special.think_close, engine.tokenizer.special.eos
    found = answer(engine, replace(guide, after_id=marker), logit_bias={end: 100.0}, logprobs=0)
    assert found.token_ids[0] == found.logprobs[0].token_id == marker
    assert found.finish_reason == "stop"
    text = engine.tokenizer.decode(found.token_ids[1:-1])
    if guide.kind == "json_schema":
        assert list(json.loads(text)) == ["name", "kind", "size"]
    elif guide.kind == "regex":
        assert re.fullmatch(guide.value, text)
    else:
        assert text in guide.value


def test_a_guide_that_need_not_come(engine: Engine) -> None:
    """What a tool call looks like if there is one: an answer without one may end."""
    assert engine.tokenizer is not None
    special = engine.tokenizer.special
    tag = {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}]}
    guide = Guide("structure", tag, after_id=special.dsml, must_come=False)
    assert answer(engine, guide, logit_bias={special.eos: 100.0}).token_ids == (special.eos,)
    assert special.dsml is not None
    found = answer(engine, guide, logit_bias={special.dsml: 100.0})
    x = engine.tokenizer.encode("x")
    assert found.token_ids[:-1] == (special.dsml, *x)
    assert found.token_ids[-1] in engine.stop_ids


def test_a_grammar(engine: Engine) -> None:
    found = answer(engine, Guide("grammar", 'root ::= ("ab" | "c") root | "."'))
    assert re.fullmatch(r"(ab|c)*\.", found.text)


def test_no_control_character_in_a_bounded_string(engine: Engine) -> None:
    assert engine.tokenizer is not None
    [tab] = engine.tokenizer.encode("\t")
    guide = Guide("json_schema", {"type": "string", "maxLength": 4})
    json.loads(answer(engine, guide, logit_bias={tab: 100.0}).text)


def test_an_end_of_the_clients_own_begins_the_answer_too(engine: Engine) -> None:
    assert engine.tokenizer is not None
    marker = engine.tokenizer.special.think_close
    guide = Guide("choice", ["left", "right"], after_id=marker)
    found = answer(engine, guide, logit_bias={65: 100.0}, stop_ids=(65,))
    assert found.token_ids[0] == marker
    assert engine.tokenizer.decode(found.token_ids[1:-1]) in ("left", "right")


def test_markers_are_never_part_of_a_text(engine: Engine) -> None:
    assert engine.tokenizer is not None
    marker = engine.tokenizer.special.think_close
    found = answer(engine, Guide("regex", ".{5}"), logit_bias={marker: 100.0})
    assert marker not in found.token_ids[:-1]


def test_company_does_not_matter_and_logprobs_are_the_models_own(engine: Engine) -> None:
    params = [
        SamplingParams(max_tokens=12, seed=i, logprobs=1, stop_ids=(), guide=guide)
        for i, guide in enumerate((Guide("regex", "[ab]{8}"), None, Guide("choice", ["x", "yy"])))
    ]
    alone = [engine.generate([PROMPT], p)[0] for p in params]
    for i, p in enumerate(params):
        engine.add(Request(f"r{i}", tuple(PROMPT), p))
    found: dict[str, list[Any]] = {f"r{i}": [] for i in range(3)}
    while engine.num_unfinished:
        for output in engine.step():
            found[output.request_id] += output.logprobs
    assert [tuple(found[f"r{i}"]) for i in range(3)] == [c.logprobs for c in alone]
    raw = engine.generate([PROMPT], SamplingParams(max_tokens=1, seed=0, logprobs=20, stop_ids=()))
    top = dict(raw[0].logprobs[0].top)
    first = alone[0].logprobs[0]
    assert top.get(first.token_id, first.logprob) == first.logprob


# --- what cannot be done ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("json_schema", "{", "cannot be read"),
        ("json_schema", 5, "expected an object"),
        ("json_schema", {"pattern": "x" * 70000}, "at most 65536"),
        ("json_schema", json.loads("[" * 200 + "]" * 200), "expected an object"),
        ("json_schema", {"a": json.loads("[" * 70 + "]" * 70)}, "at most 64 levels"),
        ("json_object", {}, "expected no value"),
        ("regex", "", "expected a text"),
        ("regex", "(", "cannot be read"),
        ("choice", [], "non-empty texts"),
        ("choice", [""], "non-empty texts"),
        ("choice", "word", "non-empty texts"),
        ("choice", ["x"] * 5000, "1 to 4096"),
        ("grammar", "", "expected a text"),
        ("structure", "x", "cannot be read"),
        ("poem", None, "guide.kind is 'poem'"),
    ],
)
def test_guides_that_are_refused_at_once(kind: Any, value: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Guide(kind, value)


def test_a_guide_object_is_needed() -> None:
    with pytest.raises(RequestError, match="guide is 'json', expected a Guide"):
        SamplingParams(guide="json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("guide", "says"),
    [
        (Guide("json_schema", {"type": "nonsense"}), "nonsense"),
        (Guide("json_schema", {"$ref": "#/nowhere"}), "cannot be used"),
        (Guide("regex", r"(a|b)\1"), "Backreference"),
        (Guide("regex", r"(?=a)b"), "ookahead"),
    ],
)
def test_guides_the_library_refuses_end_that_request_alone(
    engine: Engine, guide: Guide, says: str
) -> None:
    engine.add(Request("good", (1, 2), SamplingParams(max_tokens=3, stop_ids=())))
    engine.add(Request("bad", (1, 2), SamplingParams(guide=guide)))
    ends = {}
    while engine.num_unfinished:
        ends.update({o.request_id: o for o in engine.step() if o.finished})
    assert ends["good"].finish_reason == "length"
    assert ends["bad"].finish_reason == "error"
    assert ends["bad"].refused
    assert says in (ends["bad"].error or "")
    assert ".cc" not in (ends["bad"].error or "")


def test_look_around_in_a_schema_is_refused(engine: Engine) -> None:
    guide = Guide("json_schema", {"type": "string", "pattern": "(?!a)b"})
    with pytest.raises(RequestError, match="groups like"):
        answer(engine, guide)


def test_a_slow_guide_ends_with_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(dsv4.sampling.guided, "_compile", lambda *args: never.wait())
    monkeypatch.setattr(dsv4.sampling.guided, "COMPILE_SECONDS", 0.1)
    engine.add(Request("slow", (1,), SamplingParams(guide=Guide("regex", "slow!"))))
    ends = []
    while engine.num_unfinished:
        ends += engine.step()
    never.set()
    assert "took longer than 0.1 s" in (ends[0].error or "")


def test_abort_while_the_guide_is_compiled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    monkeypatch.setattr(dsv4.sampling.guided, "_compile", lambda *args: aborted.wait())
    engine.add(Request("gone", (1,), SamplingParams(guide=Guide("regex", "gone!"))))
    assert engine.stats().num_waiting == 1
    assert engine.abort("gone").finish_reason == "abort"
    aborted.set()
    assert engine.num_unfinished == 0
    engine.check_integrity()


def test_a_guide_no_token_can_follow(engine: Engine) -> None:
    """The vocabulary is bytes; a grammar that wants a byte no token has is a dead end."""
    guides = dsv4.sampling.guided.Guides([b"a", b"b", b""], [2])
    job = guides.compile(Guide("regex", "ax"))
    assert job.done.wait(30)
    matcher = guides.matcher(job, Guide("regex", "ax"))
    mask = matcher.mask()
    assert mask is not None
    matcher.accept(0)
    assert matcher.mask() is None
    assert matcher.is_stuck


def test_without_the_library(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'dsv4\[guided\]'"):
        answer(engine, Guide("regex", "never compiled"))


def test_without_a_tokenizer(tmp_path: Path) -> None:
    folder = write_quick_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    bare = Engine.load(folder, max_context=100)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        bare.generate([PROMPT], SamplingParams(guide=Guide("json_object")))


# --- answers of a least length ----------------------------------------------------------------


def test_no_end_before_the_least_length(engine: Engine) -> None:
    assert engine.tokenizer is not None
    end = engine.tokenizer.special.eos
    wish = {"logit_bias": {end: 100.0}, "max_tokens": 9, "seed": 1}
    [short] = engine.generate([PROMPT], SamplingParams(**wish))
    assert short.token_ids == (end,)
    [found] = engine.generate([PROMPT], SamplingParams(**wish, min_tokens=5))
    assert len(found.token_ids) == 6
    assert not engine.stop_ids & set(found.token_ids[:5])
    assert found.token_ids[5] == end
    with pytest.raises(RequestError, match="min_tokens is 10, expected a whole number of at most"):
        SamplingParams(max_tokens=9, min_tokens=10)


def test_a_complete_guide_ends_before_the_least_length(engine: Engine) -> None:
    found = answer(engine, Guide("regex", "a{2,4}"), min_tokens=50)
    assert found.finish_reason == "stop"
    assert found.text == "aaaa"  # an end was not allowed while the guide could go on
