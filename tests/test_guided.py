"""Guided output: every answer keeps to its guide, whatever the model would rather say."""

import base64
import importlib.util
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4.sampling.guided
from dsv4 import Engine, SamplingParams
from dsv4.errors import CapacityError, RequestError
from dsv4.request import Completion, Guide, Output, Request, TokenLogprobs
from dsv4.sampling import SamplingRow, guide_compiler
from tests.models import write_quick_model
from tests.server.support import wait_for

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
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_quick_model(tmp_path_factory.mktemp("model"))
    engine = Engine.load(folder, device="cpu", max_context=400, max_sequences=4)
    yield engine
    engine.close()


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


def test_nothing_is_computed_from_a_token_that_was_replaced(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the step behind it was submitted before the token was known."""
    assert engine.tokenizer is not None
    marker, end = engine.tokenizer.special.think_close, engine.tokenizer.special.eos
    guide = Guide("json_schema", SCHEMA, after_id=marker)
    options: dict[str, Any] = {"logit_bias": {end: 100.0}, "logprobs": 1}
    expected = answer(engine, guide, **options)
    monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
    found = answer(engine, guide, **options)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


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


@pytest.mark.parametrize("where", ["mask", "accept", "push"])
def test_what_breaks_one_request_breaks_no_other(
    engine: Engine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while one request's token is drawn or taken: the others of the step go on."""
    guide = Guide("regex", "[ab]{6}")
    plain = SamplingParams(max_tokens=6, seed=3, stop_ids=(), logprobs=0)
    [alone] = engine.generate([PROMPT], plain)
    answer(engine, guide)  # compiled, so that both begin together
    engine.add(Request("bad", tuple(PROMPT), SamplingParams(guide=guide, stop=("zzz",))))
    engine.add(Request("good", tuple(PROMPT), plain))
    outputs = engine.step() + engine.step()
    live = engine._live["bad"]
    target = live.text if where == "push" else live.matcher

    def fail(*args: Any) -> Any:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(target, where, fail, raising=True)
    while engine.num_unfinished:
        outputs += engine.step()
    [end] = [output for output in outputs if output.request_id == "bad" and output.finished]
    assert end.finish_reason == "error"
    assert "a bug of ours" in (end.error or "")
    assert logprobs_of("good", outputs) == alone.logprobs
    engine.check_integrity()


def logprobs_of(name: str, outputs: list[Output]) -> tuple[TokenLogprobs, ...]:
    return tuple(item for o in outputs if o.request_id == name for item in o.logprobs)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("what", ["seen", "bias", "settings", "logprobs"])
def test_a_draw_that_cannot_be_prepared_ends_its_request_alone(
    engine: Engine, what: str, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, biases and log-probabilities are put together request by request."""
    plain = SamplingParams(max_tokens=6, seed=3, stop_ids=(), logprobs=0)
    odd = replace(plain, presence_penalty=0.5, logit_bias={5: 1.0}, logprobs=3, seed=7)
    [alone], [odd_alone] = engine.generate([PROMPT], plain), engine.generate([PROMPT], odd)
    monkeypatch.setattr(engine._pipeline, "runs_ahead", runs_ahead)

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    topk = torch.topk
    with monkeypatch.context() as broken:
        if what == "logprobs":
            # of one row; the model itself asks for whole batches
            broken.setattr(
                torch, "topk", lambda x, *a, **o: (topk if x.dim() > 1 else fail)(x, *a, **o)
            )
        else:
            own = getattr(SamplingRow, what)
            broken.setattr(SamplingRow, what, lambda d, *a: (fail if d.seed == 7 else own)(d, *a))
        for name, params in (("good", plain), ("bad", odd), ("also good", plain)):
            engine.add(Request(name, tuple(PROMPT), params))
        outputs: list[Output] = []
        while engine.num_unfinished:
            outputs += engine.step()
    [end] = [output for output in outputs if output.request_id == "bad"]
    assert (end.finish_reason, end.error) == ("error", "internal error: no room")
    for name in ("good", "also good"):
        assert logprobs_of(name, outputs) == alone.logprobs
    engine.check_integrity()
    assert engine.generate([PROMPT], odd)[0].logprobs == odd_alone.logprobs  # the slot is clean


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
        ("regex", "a)(", "unbalanced"),
        ("regex", "[a", "does not end"),
        ("regex", "a\\", "does not end"),
        ("regex", "(?i)" + "[\u0100-\uffff]" * 700, "700 character classes"),
        ("regex", "a+" * 300, "300 repetitions"),
        ("regex", "a{2,99999}", "repetition of 99999"),
        ("regex", "(" * 65 + ")" * 65, "parentheses"),
        ("regex", "a" * 9000, "9000 characters"),
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


def test_no_regular_expression_of_a_client_is_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's compiler takes seconds for some, and everybody would wait."""
    compiled: list[Any] = []
    original = re._compiler.compile  # type: ignore[attr-defined]  # what every way ends in

    def note(pattern: Any, *rest: Any) -> Any:
        compiled.append(pattern)
        return original(pattern, *rest)

    monkeypatch.setattr(re._compiler, "compile", note)  # type: ignore[attr-defined]
    re.compile("something new")
    assert compiled == ["something new"]  # so this test would notice
    answer(engine, Guide("regex", "[xy]{2}z"))
    answer(engine, Guide("json_schema", {"type": "string", "pattern": "^[xy]{3}z$"}))
    assert not [pattern for pattern in compiled if "xy" in str(pattern)]


def test_a_guide_object_is_needed() -> None:
    with pytest.raises(RequestError, match="guide is 'json', expected a Guide"):
        SamplingParams(guide="json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("guide", "says"),
    [
        (Guide("json_schema", {"type": "nonsense"}), "nonsense"),
        (Guide("json_schema", {"$ref": "#/nowhere"}), "cannot be used"),
        (Guide("json_schema", {"$ref": "#"}), "no answer can satisfy it"),
        (
            Guide("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "no answer can satisfy it",
        ),
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


# --- compiling elsewhere ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def troubled(engine: Engine) -> Iterator[Engine]:
    """The engine with a compiler that can be made to misbehave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            guide_compiler, "PROGRAM", (str(Path(__file__).with_name("slow_compiler.py")),)
        )
        patch.setattr(guide_compiler, "COMPILE_SECONDS", 2.0)
        engine.close()
        patch.delitem(engine.__dict__, "_guides", raising=False)
        answer(engine, Guide("choice", ["started"]))
        yield engine
        engine.close()
        del engine.__dict__["_guides"]


def ends_of(engine: Engine, *guides: Guide) -> list[Output]:
    for place, guide in enumerate(guides):
        engine.add(Request(f"g{place}", (1,), SamplingParams(guide=guide, max_tokens=20)))
    ends = {}
    while engine.num_unfinished:
        ends.update({output.request_id: output for output in engine.step() if output.finished})
    return [ends[f"g{place}"] for place in range(len(guides))]


def test_a_slow_guide_is_ended_and_others_are_not_blamed(troubled: Engine) -> None:
    """Two are compiled at once, so the last one waits longer than a compilation may take."""
    slow = [Guide("choice", [f"slow {number}"]) for number in range(4)]
    *ends, good = ends_of(troubled, *slow, Guide("choice", ["in", "nocent"]))
    for end in ends:
        assert end.refused
        assert "took longer than 2 s" in (end.error or "")
    assert good.finish_reason == "stop"


@pytest.mark.parametrize(
    ("word", "says"), [("crash", "its compilation failed"), ("greedy", "too much memory")]
)
def test_a_guide_that_breaks_its_compiler(troubled: Engine, word: str, says: str) -> None:
    bad, good = ends_of(troubled, Guide("choice", [word]), Guide("choice", [f"not {word[:3]}"]))
    assert says in (bad.error or "")
    assert bad.refused
    assert good.finish_reason == "stop"


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_guides_nobody_waits_for_leave_nothing_behind(
    troubled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = troubled._guides._process
    assert process._process is not None
    num_threads = threading.active_count()
    for number in range(20):
        params = SamplingParams(guide=Guide("choice", [f"slow and left {number}"]))
        troubled.add(Request(f"left{number}", (1,), params))
    assert troubled.stats().num_waiting == 20
    for number in range(20):
        assert troubled.abort(f"left{number}").finish_reason == "abort"
    assert troubled.num_unfinished == 0
    assert process._pending == {}
    [good] = ends_of(troubled, Guide("choice", ["behind them"]))
    assert good.finish_reason == "stop"
    assert children_of(process._process.pid) == []
    assert threading.active_count() <= num_threads  # those of others may end meanwhile
    troubled.check_integrity()


def test_a_full_queue_of_guides(troubled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_compiler, "MAX_PENDING", 3)
    for number in range(3):
        params = SamplingParams(guide=Guide("choice", [f"slow queue {number}"]))
        troubled.add(Request(f"q{number}", (1,), params))
    with pytest.raises(CapacityError, match="3 guides wait"):
        troubled.add(Request("more", (1,), SamplingParams(guide=Guide("choice", ["more"]))))
    for number in range(3):
        troubled.abort(f"q{number}")
    assert troubled.num_unfinished == 0


def test_a_compiler_that_dies_is_started_again(troubled: Engine) -> None:
    """Its child, which would sleep on, ends with it."""
    process = troubled._guides._process._process
    assert process is not None
    troubled.add(Request("slow", (1,), SamplingParams(guide=Guide("choice", ["slow death"]))))
    wait_for(lambda: len(children_of(process.pid)) == 1)
    [child] = children_of(process.pid)
    process.kill()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), 50)
    [end] = [output for output in iter_until_done(troubled) if output.finished]
    assert "try again" in (end.error or "")
    assert not end.refused
    [good] = ends_of(troubled, Guide("choice", ["again"]))
    assert good.finish_reason == "stop"


def test_a_compiler_whose_engine_was_killed_ends_with_its_children() -> None:
    """Its engine left an answer unread, so that the line is not closed but reset."""
    ours, theirs = socket.socketpair()
    program = Path(__file__).with_name("slow_compiler.py")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    try:
        words = [base64.b64encode(word).decode() for word in (b"a", b"b", b"")]
        begin = {"do": "begin", "vocabulary": words, "stop_ids": [2], "seconds": 1000}
        quick = {"do": "compile", "number": 1, "kind": "regex", "text": "ab"}
        slow = {"do": "compile", "number": 2, "kind": "choice", "text": '["slow"]'}
        for message in (begin, quick, slow):
            ours.sendall(json.dumps(message).encode() + b"\n")
        assert select.select([ours], [], [], 200)[0], "no answer came"
        wait_for(lambda: len(children_of(process.pid)) == 1)
        [child] = children_of(process.pid)
        ours.close()
        assert process.wait(200) == -signal.SIGKILL
        wait_for(lambda: not Path(f"/proc/{child}").exists())
    finally:
        ours.close()
        process.kill()
        process.wait()


def iter_until_done(engine: Engine) -> Iterator[Output]:
    while engine.num_unfinished:
        yield from engine.step()


def test_a_guide_no_token_can_follow(engine: Engine) -> None:
    """The vocabulary is bytes; a grammar that wants a byte no token has is a dead end."""
    guides = dsv4.sampling.guided.Guides([b"a", b"b", b""], [2])
    job = guides.compile(Guide("regex", "ax"))
    assert job.done.wait(100)
    guides.close()
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
