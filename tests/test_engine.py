"""The engine as its users see it: answers, ends, errors; nothing lost and nothing left behind."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import dsv4.ops.fused.block
from dsv4 import Engine, SamplingParams
from dsv4.errors import CheckpointError, ConfigError, Dsv4Error, OptionError, RequestError
from dsv4.request import Output, Request, TokenLogprobs, join_outputs
from dsv4.runner.runner import SubmittedStep
from dsv4.sampling import SamplingRow
from dsv4.scheduler import Scheduler
from tests.models import spoiled, write_fast_model, write_quick_model

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
LENGTH = 8
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, stop_ids=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fast_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Engine:
    """One token a step, so that tests can count; tests/test_drafting.py has several."""
    return Engine.load(folder, max_context=300, max_sequences=3, chunk_tokens=32, draft="off")


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An idle engine, which must be idle and whole again after every test."""
    yield shared
    assert shared.num_unfinished == 0
    shared.check_integrity()
    pages = shared._runner.pages
    assert pages.num_free_slots == 3
    for allocator in pages.allocators.values():
        assert allocator.num_available == allocator.num_pages


def with_(params: SamplingParams, **changes: Any) -> SamplingParams:
    return dataclasses.replace(params, **changes)


def logits_of(engine: Engine, ids: list[int]) -> Tensor:
    return torch.cat(list(engine.score(ids)))


def run(engine: Engine) -> dict[str, list[Output]]:
    """Step until nothing is left; the outputs of each request."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(1000):
        if engine.num_unfinished == 0:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("requests are left after 1000 steps")


# --- choosing tokens --------------------------------------------------------------------------


def test_greedy_takes_the_largest_logit_each_time(engine: Engine) -> None:
    [answer] = engine.generate([PROMPT], GREEDY)
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == LENGTH
    logits = logits_of(engine, PROMPT + list(answer.token_ids[:-1]))
    assert logits[len(PROMPT) - 1 :].argmax(1).tolist() == list(answer.token_ids)


def test_a_seed_gives_the_same_answer_again(engine: Engine) -> None:
    params = with_(GREEDY, temperature=1.0, seed=11)
    [first] = engine.generate([PROMPT], params)
    [again] = engine.generate([PROMPT], params)
    assert first.token_ids == again.token_ids
    [other] = engine.generate([PROMPT], with_(params, seed=12))
    assert other.token_ids != first.token_ids
    # in company the answer is the same
    crowd = engine.generate([PROMPT, PROMPT[:3], PROMPT[::-1], PROMPT * 5], params)
    assert crowd[0].token_ids == first.token_ids


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    params = with_(GREEDY, temperature=1.0)
    answers = {answer.token_ids for answer in engine.generate([PROMPT] * 4, params)}
    assert len(answers) > 1


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_filter_equals_greedy(engine: Engine, changes: dict[str, Any]) -> None:
    [greedy] = engine.generate([PROMPT], GREEDY)
    [filtered] = engine.generate([PROMPT], with_(GREEDY, temperature=2.0, **changes))
    assert filtered.token_ids == greedy.token_ids


def test_a_bias_forces_and_forbids(engine: Engine) -> None:
    [plain] = engine.generate([PROMPT], GREEDY)
    [forced] = engine.generate([PROMPT], with_(GREEDY, logit_bias={42: 100.0}))
    assert set(forced.token_ids) == {42}
    first = plain.token_ids[0]
    [without] = engine.generate([PROMPT], with_(GREEDY, logit_bias={first: -100.0}))
    assert first not in without.token_ids


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 1.5}, {"repetition_penalty": 1.5}],
)
def test_penalties_act_on_what_was_said(engine: Engine, penalty: dict[str, float]) -> None:
    """Each token is the largest logit after the penalty for the tokens before it."""
    # a bias towards a few tokens, so that they come again and again
    bias = {40: 30.0, 41: 30.0, 42: 30.0}
    params = with_(GREEDY, logit_bias=bias)
    [plain] = engine.generate([[*PROMPT, 41]], params)
    [answer] = engine.generate([[*PROMPT, 41]], with_(params, **penalty))
    assert answer.token_ids != plain.token_ids
    logits = logits_of(engine, [*PROMPT, 41, *answer.token_ids[:-1]])[len(PROMPT) :]
    for place, row in enumerate(logits.tolist()):
        said = list(answer.token_ids[:place])
        for token in range(len(row)):
            row[token] += bias.get(token, 0.0)
            if token in said or token in [*PROMPT, 41]:
                factor = penalty.get("repetition_penalty", 1.0)
                row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
            row[token] -= penalty.get("presence_penalty", 0.0) * (token in said)
            row[token] -= penalty.get("frequency_penalty", 0.0) * said.count(token)
        assert answer.token_ids[place] == row.index(max(row))


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    params = with_(GREEDY, temperature=0.7, seed=5, logprobs=4, logit_bias={9: 3.0})
    [answer] = engine.generate([PROMPT], params)
    assert len(answer.logprobs) == len(answer.token_ids)
    logits = logits_of(engine, PROMPT + list(answer.token_ids[:-1]))[len(PROMPT) - 1 :]
    expected = torch.log_softmax(logits.double(), 1)
    for row, item, token in zip(expected, answer.logprobs, answer.token_ids, strict=True):
        assert item.token_id == token
        assert item.logprob == pytest.approx(float(row[token]), abs=1e-5)
        values = [value for _, value in item.top]
        assert values == sorted(values, reverse=True)
        assert [t for t, _ in item.top] == row.topk(4).indices.tolist()
        assert values == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)


def test_logprobs_only_when_asked(engine: Engine) -> None:
    assert engine.generate([PROMPT], GREEDY)[0].logprobs == ()
    [answer] = engine.generate([PROMPT], with_(GREEDY, logprobs=0))
    assert all(item.top == () and item.logprob < 0 for item in answer.logprobs)


def test_scoring_is_teacher_forced_and_leaves_nothing(engine: Engine) -> None:
    ids = [i * 7 % 250 for i in range(100)]  # more than three chunks
    whole = logits_of(engine, ids)
    assert whole.shape == (100, 271)
    assert whole.dtype == torch.float32
    assert torch.equal(logits_of(engine, ids[:40]), whole[:40])
    parts = engine.score(ids)
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert len(logits_of(engine, list(range(256)) + list(range(44)))) == 300  # the whole context


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_max_tokens(engine: Engine, count: int) -> None:
    [answer] = engine.generate([PROMPT], with_(GREEDY, max_tokens=count))
    assert len(answer.token_ids) == count
    assert answer.finish_reason == "length"


def test_the_context_ends_an_answer(engine: Engine) -> None:
    [answer] = engine.generate([PROMPT * 29], with_(GREEDY, max_tokens=100))
    assert len(answer.token_ids) == 300 - 290
    assert answer.finish_reason == "length"


def test_stop_ids(engine: Engine) -> None:
    [plain] = engine.generate([PROMPT], GREEDY)
    stop = plain.token_ids[4]
    [answer] = engine.generate([PROMPT], with_(GREEDY, stop_ids=(250, stop)))
    cut = plain.token_ids.index(stop)
    assert answer.token_ids == plain.token_ids[: cut + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_the_models_own_end_marker_stops_by_default(engine: Engine) -> None:
    assert {256, 257} <= engine.stop_ids
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={257: 100.0})
    [answer] = engine.generate([PROMPT], params)
    assert answer.token_ids == (257,)
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", 257, "")


def test_every_id_of_a_list_ends_an_answer(tmp_path: Path) -> None:
    path = write_quick_model(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [257, 19]}))
    engine = Engine.load(str(tmp_path), device="cpu", max_context=64, max_sequences=1)
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={19: 100.0})
    [answer] = engine.generate([[65, 66]], params)
    assert (answer.token_ids, answer.stop_reason) == ((19,), 19)


@pytest.fixture
def says(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every request say a given text, token by token."""

    def script(text: str) -> None:
        assert engine.tokenizer is not None
        tokens = engine.tokenizer.encode(text)

        def sample(submitted: SubmittedStep, rows: list[SamplingRow]) -> None:
            assert len(submitted.sampled) == len(rows)
            places = [len(row.token_ids) - row.num_prompt for row in rows]
            drawn = [TokenLogprobs(tokens[place], 0.0) for place in places]
            answers = [[one] for one in drawn]
            submitted.results = Mock(answers=lambda: answers, failures={}, load=None)

        monkeypatch.setattr(engine._runner, "sample", sample)

    return script


def test_text_streams_in_whole_characters(engine: Engine, says: Any) -> None:
    text = "Größe: 3 € 🙂!"
    says(text)
    size = len(engine.encode(text, "raw"))
    pieces = [out.text for out in engine.stream(PROMPT, with_(GREEDY, max_tokens=size))]
    assert "".join(pieces) == text
    assert len(pieces) == size > len(text)
    assert "🙂" in pieces  # its bytes came in several tokens, its text in one piece


def test_a_broken_character_at_the_end_is_shown_as_such(engine: Engine, says: Any) -> None:
    says("ab🙂")
    size = len(engine.encode("ab🙂", "raw")) - 1
    [answer] = engine.generate([PROMPT], with_(GREEDY, max_tokens=size))
    assert answer.text == "ab\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("stop", "shown", "matched"),
    [
        (("END",), "one two E EN ", "END"),
        (("two E", "END"), "one ", "two E"),
        (("o E EN END t",), "one tw", "o E EN END t"),
        (("nothing",), "one two E EN END tail", None),
        (("tail and more",), "one two E EN END tail", None),
        (("one",), "", "one"),
    ],
)
def test_stop_strings(
    engine: Engine, says: Any, stop: tuple[str, ...], shown: str, matched: str | None
) -> None:
    text = "one two E EN END tail"
    says(text)
    size = len(engine.encode(text, "raw"))
    assert size > 10, "the stop strings must lie across tokens"
    outputs = list(engine.stream(PROMPT, with_(GREEDY, max_tokens=size, stop=stop)))
    assert "".join(out.text for out in outputs) == shown
    assert outputs[-1].stop_reason == matched
    assert outputs[-1].finish_reason == ("stop" if matched else "length")
    # nothing that belongs to a stop string was shown before it was known
    seen = ""
    for out in outputs:
        seen += out.text
        assert shown.startswith(seen)


# --- many requests ----------------------------------------------------------------------------


def test_more_requests_than_slots_all_finish(engine: Engine) -> None:
    prompts = [[i + 1] * (1 + 13 * i % 50) for i in range(7)]
    alone = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    together = [answer.token_ids for answer in engine.generate(prompts, GREEDY)]
    assert together == alone


def test_requests_may_join_at_any_time(engine: Engine) -> None:
    expected = [engine.generate([PROMPT[i:]], GREEDY)[0].token_ids for i in range(4)]
    for i in range(4):
        engine.add(Request(f"r{i}", tuple(PROMPT[i:]), GREEDY))
        engine.step()
    rest = run(engine)
    for i in range(4):
        tokens = tuple(t for out in rest[f"r{i}"] for t in out.token_ids)
        assert expected[i][-len(tokens) :] == tokens
        assert [out.finished for out in rest[f"r{i}"]].count(True) == 1


def test_an_id_in_use_is_refused_and_free_again_later(engine: Engine) -> None:
    engine.add(Request("a", (1, 2), GREEDY))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(Request("a", (3,), GREEDY))
    assert len(run(engine)["a"]) == LENGTH
    engine.add(Request("a", (3,), GREEDY))
    run(engine)


def test_abort_while_waiting_prefilling_and_decoding(engine: Engine) -> None:
    long = Request("long", tuple(PROMPT * 20), GREEDY)
    for request in (Request("short", (5,), GREEDY), long, Request("third", (6,), GREEDY)):
        engine.add(request)
    engine.add(Request("waits", (7,), GREEDY))
    engine.step()
    for name in ("short", "long", "waits"):
        output = engine.abort(name)
        assert (output.request_id, output.finish_reason, output.finished) == (name, "abort", True)
        with pytest.raises(RequestError, match="no running request"):
            engine.abort(name)
    engine.check_integrity()
    rest = run(engine)
    assert set(rest) == {"third"}


def test_closing_a_stream_aborts_it(engine: Engine) -> None:
    stream = engine.stream(PROMPT, with_(GREEDY, max_tokens=200))
    next(stream)
    assert engine.num_unfinished == 1
    stream.close()  # type: ignore[attr-defined]
    assert engine.num_unfinished == 0


def test_streams_side_by_side_lose_nothing(engine: Engine) -> None:
    """A step run for one listener brings tokens for the others too; they wait."""
    expected = [engine.generate([PROMPT[i:]], GREEDY)[0].token_ids for i in range(3)]
    engine.add(Request("added", tuple(PROMPT[2:]), GREEDY))
    streams = [engine.stream(PROMPT[i:], GREEDY) for i in range(2)]
    heard: list[list[int]] = [[], []]
    heard[0] += next(streams[0]).token_ids
    heard[1] += next(streams[1]).token_ids
    heard[0] += [t for out in streams[0] for t in out.token_ids]  # runs the others to their end
    heard[1] += [t for out in streams[1] for t in out.token_ids]
    assert [tuple(tokens) for tokens in heard] == expected[:2]
    assert engine.num_unfinished == 1
    rest = [t for out in run(engine)["added"] for t in out.token_ids]
    assert tuple(rest) == expected[2]


def test_interrupted_generate_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    real = engine._runner.submit
    monkeypatch.setattr(engine._runner, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, PROMPT[1:]], GREEDY)
    assert engine.num_unfinished == 0


# --- a step that fails ------------------------------------------------------------------------


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [expected] = engine.generate([PROMPT], GREEDY)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the device fell off")

    for i in range(4):  # three run, one waits
        engine.add(Request(f"r{i}", tuple(PROMPT), GREEDY))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(dsv4.ops.fused.block, "router_experts", broken)
        outputs = engine.step()
    assert {out.request_id for out in outputs} == {"r0", "r1", "r2"}
    for out in outputs:
        assert out.finish_reason == "error"
        assert out.error == "internal error: the device fell off"
        assert out.token_ids == ()
    assert "the device fell off" in caplog.text
    assert "Traceback" not in caplog.text
    engine.check_integrity()
    rest = run(engine)
    assert tuple(t for out in rest["r3"] for t in out.token_ids) == expected.token_ids


def test_a_stall_ends_the_requests_and_the_engine_goes_on(engine: Engine) -> None:
    """They would wait for ever: each learns who waits for what."""
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(Scheduler, "_plan", lambda self: [])
        answers = engine.generate([PROMPT] * 4, GREEDY)
    assert {answer.finish_reason for answer in answers} == {"error"}
    for answer in answers:
        assert f"{answers[0].request_id!r} waits for its turn (0 of 10" in (answer.error or "")
        assert f"{answers[3].request_id!r} waits for a slot" in (answer.error or "")
    assert engine.generate([PROMPT], GREEDY)[0].finish_reason == "length"


@pytest.fixture
def ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """It submits a step before it has read the last one, as on a GPU."""
    monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
    return engine


def test_steps_ahead_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = with_(GREEDY, temperature=1.0, seed=5, logprobs=2, presence_penalty=0.5)
    prompts = [PROMPT[:1], PROMPT * 5, PROMPT, PROMPT * 12, PROMPT[:3]]
    expected = engine.generate(prompts, params)
    monkeypatch.setattr(engine._pipeline, "runs_ahead", True)
    found = engine.generate(prompts, params)
    assert [(a.token_ids, a.logprobs) for a in found] == [
        (a.token_ids, a.logprobs) for a in expected
    ]


def test_a_step_ahead_that_fails_keeps_the_tokens_before_it(
    ahead: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing step is submitted while the one before it still brings a token of each."""
    expected = [answer.token_ids for answer in ahead.generate([PROMPT] * 2, GREEDY)]
    submit, num_left = ahead._runner.submit, 4

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise RuntimeError("the device fell off")
        return submit(*args, **kwargs)

    monkeypatch.setattr(ahead._runner, "submit", fails_later)
    answers = ahead.generate([PROMPT] * 2, GREEDY)
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.error == "internal error: the device fell off"
        assert answer.token_ids == tokens[:3]


def test_a_step_ahead_that_fails_leaves_answers_alone_that_were_complete(
    ahead: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that ends an answer arrives together with the failure of the step behind it."""
    params = with_(GREEDY, temperature=1.0, seed=5)
    [plain] = ahead.generate([PROMPT], params)
    submit, num_steps = ahead._runner.submit, 0

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            raise RuntimeError("the device fell off")
        return submit(*args, **kwargs)

    monkeypatch.setattr(ahead._runner, "submit", fails_later)
    last = plain.token_ids[2]
    assert last not in plain.token_ids[:2]
    ahead.add(Request("complete", tuple(PROMPT), with_(params, stop_ids=(last,))))
    ahead.add(Request("cut", tuple(PROMPT), params))
    answers = {name: outputs[-1] for name, outputs in run(ahead).items()}
    assert (answers["complete"].finish_reason, answers["complete"].error) == ("stop", None)
    assert answers["cut"].error == "internal error: the device fell off"
    ahead.check_integrity()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_request_with_nan_fails_alone(
    engine: Engine, value: float, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its prompt, at once or 100 tokens later; or in its answer, once a step has read it."""
    params = with_(GREEDY, temperature=1.0, logprobs=2)
    plain, other = (engine.generate([PROMPT], with_(params, seed=seed))[0] for seed in (5, 6))
    bad = next(t for t in other.token_ids if t not in (*PROMPT, *plain.token_ids))
    place = other.token_ids.index(bad)
    engine._prefixes[0].clear()
    monkeypatch.setattr(engine._pipeline, "runs_ahead", is_ahead)
    prompts = {"ends": [*PROMPT, bad], "far": [*PROMPT, bad, *PROMPT * 13], "says": PROMPT}
    with spoiled(engine, bad, value):
        for name, prompt in prompts.items():
            engine.add(Request(name, tuple(prompt), with_(params, seed=6)))
        engine.add(Request("sound", tuple(PROMPT), with_(params, seed=5)))
        outputs = run(engine)
    for name in prompts:
        assert [o.finish_reason for o in outputs[name]].count("error") == 1, name
        assert "gave NaN" in (outputs[name][-1].error or "")
    assert len(outputs["ends"]) == len(outputs["far"]) == 1
    said = tuple(t for output in outputs["says"] for t in output.token_ids)
    assert said == other.token_ids[: place + 1]
    found = join_outputs(Request("sound", tuple(PROMPT), params), outputs["sound"])
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)
    assert not engine.cached_prefixes()
    assert engine.generate([PROMPT], with_(params, seed=6))[0].logprobs == other.logprobs


def test_prefixes_with_nan_are_forgotten(folder: Path, tmp_path: Path) -> None:
    """In memory and on disk, with those that the request started from; others stay."""
    sizes = {"max_context": 600, "max_sequences": 2, "prefix_disk": str(tmp_path)}
    engine, files = Engine.load(folder, **sizes), lambda: len(list(tmp_path.glob("*/*.prefix")))
    prompts = [[token] * 140 for token in (8, 9)]
    wanted = engine.generate(prompts, GREEDY)
    for prefix in engine._prefixes:
        prefix.flush()
    sound = engine.cached_prefixes()
    assert files() == len(sound) == 2
    with spoiled(engine, 7):
        [answer] = engine.generate([[9] * 140 + [7] + [9] * 140], GREEDY)
    assert (answer.finish_reason, answer.num_cached) == ("error", 128)
    assert files() == len(engine.cached_prefixes() & sound) == len(engine.cached_prefixes()) == 1
    assert [a.token_ids for a in engine.generate(prompts, GREEDY)] == [a.token_ids for a in wanted]
    engine.check_integrity()


def test_our_own_errors_keep_their_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Dsv4Error("found this, expected that")

    monkeypatch.setattr(dsv4.ops.fused.block, "router_experts", refuse)
    [answer] = engine.generate([PROMPT], GREEDY)
    assert (answer.finish_reason, answer.error) == ("error", "found this, expected that")


# --- bad requests -----------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("max_tokens", (0, -1, 1.5, True, None, "5", 2**40)),
        ("temperature", (-0.1, NAN, INF, "1", None, True, 101)),
        ("top_p", (0, -0.5, 1.1, NAN, None, "x")),
        ("top_k", (-1, 1.5, None, True)),
        ("min_p", (-0.1, 1.1, NAN, None)),
        ("repetition_penalty", (0, -1, NAN, INF, None)),
        ("presence_penalty", (-2.1, 2.1, NAN, None)),
        ("frequency_penalty", (-2.1, 2.1, NAN, None)),
        ("seed", (1.5, "1", 2**63, True)),
        ("logprobs", (-1, 65, 1.0, True)),
        ("stop", ("word", [], ("",), ("x" * 5000,), (3,), ("a",) * 65)),
        ("stop_ids", ([1], (-1,), ("1",), (1.0,), tuple(range(65)))),
        (
            "logit_bias",
            ({-1: 1.0}, {1: 101.0}, {1: NAN}, {"1": 1.0}, {1: "x"}, {1: None}, None, [1]),
        ),
    ],
)
def test_impossible_sampling_values(name: str, bad: tuple[Any, ...]) -> None:
    for value in bad:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value).startswith(f"{name} is ")
        assert "expected" in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], ("empty", "at least one token")),
        ([1, 271], ("token 1", "271", "0 to 270")),
        ([-1], ("token 0", "-1", "0 to 270")),
        ([1, "2"], ("token 1", "'2'")),
        ([True], ("token 0", "True")),
        ([1.0], ("token 0", "1.0")),
        ([5] * 300, ("300 tokens", "at most 299", "max_context")),
        (7, ("7", "expected a text or a list")),
    ],
)
def test_bad_prompts(engine: Engine, prompt: Any, says: tuple[str, ...]) -> None:
    engine.add(Request("other", (5,), GREEDY))
    engine.step()
    for attempt in (
        lambda: engine.generate([PROMPT, prompt], GREEDY),
        lambda: list(engine.stream(prompt, GREEDY)),
    ):
        with pytest.raises(RequestError) as caught:
            attempt()
        for word in says:
            assert word in str(caught.value)
        assert caught.value.exit_code == 2
    assert len(run(engine)["other"]) == LENGTH - 1  # untouched


@pytest.mark.parametrize("prompt", [[], [1, 271], [5] * 301])
def test_scoring_bad_ids(engine: Engine, prompt: list[int]) -> None:
    with pytest.raises(RequestError):
        list(engine.score(prompt))


@pytest.mark.parametrize("name", ["logit_bias", "stop_ids"])
def test_tokens_named_outside_the_vocabulary(engine: Engine, name: str) -> None:
    value = {271: 1.0} if name == "logit_bias" else (271,)
    with pytest.raises(RequestError, match=f"{name} names token 271, the last id is 270"):
        engine.generate([PROMPT], with_(GREEDY, **{name: value}))


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    engine = Engine.load(write_fast_model(tmp_path, tokenizer=False), max_context=100)
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        engine.generate("hello")
    [answer] = engine.generate([PROMPT], GREEDY)
    assert answer.text == ""
    assert len(answer.token_ids) == LENGTH


# --- bad checkpoints and choices --------------------------------------------------------------


def test_missing_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor an embedded model") as caught:
        Engine.load(tmp_path / "nowhere")
    assert "tiny" in str(caught.value)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Engine.load(tmp_path)


def test_bad_choices(folder: Path) -> None:
    with pytest.raises(OptionError, match="kv_fromat"):
        Engine.load(folder, kv_fromat="fp8")
    with pytest.raises(OptionError, match="max_context is 5000"):
        Engine.load(folder, max_context=5000)
    with pytest.raises(OptionError, match="ops names 'wings'"):
        Engine.load(folder, max_context=100, ops="wings")
    Engine.load(folder, max_context=100, ops="linear,router")
    Engine.load(folder, max_context=100)


def test_ops_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_OPS", "wings")
    with pytest.raises(OptionError, match="wings"):
        Engine.load(folder, max_context=100)
    Engine.load(folder, max_context=100, ops="reference")  # the choice wins over the variable
    monkeypatch.delenv("DSV4_OPS")
    Engine.load(folder, max_context=100)


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
@pytest.mark.parametrize("index_format", ["fp4", "fp8"])
def test_nan_in_trained_formats_fails_one_request(
    folder: Path, kv_format: str, index_format: str
) -> None:
    packed = Engine.load(folder, kv_format=kv_format, index_format=index_format, max_context=300)
    prompts = [PROMPT * 3, [*PROMPT, 7, *PROMPT * 20]]
    [alone] = packed.generate(prompts[:1], GREEDY)
    with spoiled(packed, 7):
        found, failed = packed.generate(prompts, GREEDY)
    assert found.token_ids == alone.token_ids
    assert "gave NaN" in (failed.error or "")


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
@pytest.mark.parametrize("index_format", ["fp4", "fp8"])
def test_trained_formats_stay_close_to_exact(
    engine: Engine, folder: Path, kv_format: str, index_format: str
) -> None:
    rounded = Engine.load(
        folder, max_context=300, chunk_tokens=32, kv_format=kv_format, index_format=index_format
    )
    ids = [i * 7 % 250 for i in range(140)]
    exact, found = logits_of(engine, ids), logits_of(rounded, ids)
    error = (exact - found).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < 0.3, f"relative error {error:.4f}"


def test_bf16_activations_stay_close(engine: Engine, folder: Path) -> None:
    rounded = Engine.load(folder, max_context=300, chunk_tokens=32, dtype="bfloat16")
    ids = [i * 7 % 250 for i in range(64)]
    exact, found = logits_of(engine, ids), logits_of(rounded, ids)
    error = (exact - found).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < 0.3


def test_progress_is_reported(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    Engine.load(folder, max_context=100, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_embedded_model_answers_text() -> None:
    engine = Engine.load("tiny", max_context=512)
    params = SamplingParams(max_tokens=3, temperature=0, stop_ids=(), logprobs=1)
    [answer] = engine.generate("Hi", params)
    assert len(answer.token_ids) == 3
    assert answer.prompt_ids == tuple(engine.encode("Hi"))
    assert answer.prompt_ids[0] == engine.config.bos_id
    assert all(math.isfinite(item.logprob) for item in answer.logprobs)
    assert engine.encode("Hi", "thinking") != engine.encode("Hi", "chat")
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(engine.encode("Hi", "raw")) == "Hi"
