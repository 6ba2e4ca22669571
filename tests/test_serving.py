"""The engine as a server needs it: streams for asyncio, deadlines, counts, traces, the audit."""

import asyncio
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4 import Engine, SamplingParams
from dsv4.errors import OptionError, RequestError
from dsv4.request import Output, Request, TokenLogprobs
from dsv4.util.events import ChromeTrace, Event
from tests.models import write_quick_model

PROMPT = [3, 14, 15, 92, 65]
PARAMS = SamplingParams(max_tokens=5, temperature=1.0, seed=3, stop_ids=(), logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quick_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, device="cpu", max_context=400, max_sequences=3)


def run(engine: Engine) -> dict[str, Output]:
    """The last output of each request."""
    last = {}
    for _ in range(2000):
        if engine.num_unfinished == 0:
            return last
        last.update({output.request_id: output for output in engine.step()})
    raise AssertionError("requests are left")


# --- streams ----------------------------------------------------------------------------------


def test_async_streams_side_by_side(engine: Engine) -> None:
    expected = [engine.generate([PROMPT[i:]], PARAMS)[0].token_ids for i in range(3)]

    async def listen(i: int) -> tuple[int, ...]:
        tokens: list[int] = []
        async for output in engine.astream(PROMPT[i:], PARAMS):
            tokens += output.token_ids
        return tuple(tokens)

    async def together() -> list[tuple[int, ...]]:
        ticks = asyncio.create_task(tick())
        answers = await asyncio.gather(*(listen(i) for i in range(3)))
        ticks.cancel()
        return answers

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            num_ticks += 1
            await asyncio.sleep(0.001)

    num_ticks = 0
    assert asyncio.run(together()) == expected
    assert num_ticks > 3  # the loop was free while steps ran
    assert asyncio.run(together()) == expected  # and on a loop of its own again


def test_leaving_an_async_stream_aborts_it(engine: Engine) -> None:
    async def leave() -> None:
        stream = engine.astream(PROMPT, replace(PARAMS, max_tokens=300))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    assert engine.num_unfinished == 0
    engine.check_integrity()


def test_a_bad_async_request_is_an_error_of_its_own(engine: Engine) -> None:
    async def both() -> tuple[Any, list[Output]]:
        good = asyncio.create_task(collect())
        with pytest.raises(RequestError, match="empty"):
            async for _ in engine.astream([], PARAMS):
                pass
        return None, await good

    async def collect() -> list[Output]:
        return [output async for output in engine.astream(PROMPT, PARAMS)]

    _, outputs = asyncio.run(both())
    assert outputs[-1].finish_reason == "length"


def test_n_answers(engine: Engine) -> None:
    answers = engine.generate([PROMPT, PROMPT[1:]], PARAMS, n=3)
    for i, prompt in enumerate((PROMPT, PROMPT[1:])):
        for j in range(3):
            [alone] = engine.generate([prompt], replace(PARAMS, seed=3 + j))
            assert answers[3 * i + j].token_ids == alone.token_ids
    for bad in (0, -1, 1.0, 1000):
        with pytest.raises(RequestError, match="n is"):
            engine.generate([PROMPT], PARAMS, n=bad)  # type: ignore[arg-type]


def test_n_answers_read_their_prompt_once(folder: Path) -> None:
    engine = Engine.load(folder, device="cpu", max_context=600, max_sequences=3)
    answers = engine.generate([[9] * 400], PARAMS, n=3)
    assert [answer.num_cached for answer in answers] == [0, 256, 256]  # the first chunk
    assert len({answer.token_ids for answer in answers}) > 1


# --- deadlines and priorities -----------------------------------------------------------------


def test_a_deadline_aborts_running_and_waiting_requests(engine: Engine) -> None:
    long = replace(PARAMS, max_tokens=300)
    for i in range(4):
        engine.add(Request(f"late{i}", tuple(PROMPT), long, deadline=0.05))
    engine.add(Request("free", tuple(PROMPT), PARAMS))
    engine.step()
    time.sleep(0.06)
    ends = run(engine)
    for i in range(4):
        assert ends[f"late{i}"].finish_reason == "abort"
        assert ends[f"late{i}"].error == "the deadline of 0.05 s has passed"
    assert ends["free"].finish_reason == "length"
    engine.check_integrity()


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": 101},
        {"priority": 1.0},
        {"priority": True},
        {"deadline": 0},
        {"deadline": float("nan")},
        {"deadline": "1"},
        {"cache_salt": "x" * 2000},
        {"cache_salt": None},
    ],
)
def test_bad_fields_of_a_request(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        Request("r", (1,), PARAMS, **fields)


def test_preemption_changes_nothing(folder: Path) -> None:
    """Pages for one long sequence and four that want more: they take turns, to the same bits."""
    params = replace(PARAMS, max_tokens=26)
    prompts = [[i + 1] * 110 for i in range(4)]
    cold = Engine.load(folder, device="cpu", prefix_cache=False, max_sequences=1, max_context=400)
    expected = [cold.generate([prompt], params)[0] for prompt in prompts]
    tight = Engine.load(
        folder, device="cpu", max_sequences=4, max_context=256, state_tokens=256, chunk_tokens=64
    )
    for allocator in tight._runner.pages.allocators.values():  # and a little tighter still
        if allocator.name == "csa":
            allocator.take(allocator.num_pages - 5)
    answers = tight.generate(prompts, params)
    assert tight.stats().num_preemptions > 0
    for found, right in zip(answers, expected, strict=True):
        assert found.token_ids == right.token_ids
        assert found.logprobs == right.logprobs


# --- what the engine tells --------------------------------------------------------------------


def test_stats_count(folder: Path) -> None:
    engine = Engine.load(folder, device="cpu", max_context=400, max_sequences=2)
    engine.add(Request("a", tuple(PROMPT), PARAMS))
    engine.add(Request("b", tuple(PROMPT), PARAMS))
    engine.add(Request("c", tuple(PROMPT), PARAMS))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 1, 1)
    assert stats.pages_used["window"] == 2
    assert stats.last_step_s > 0
    engine.abort("b")
    run(engine)
    stats = engine.stats()
    assert stats.num_finished == {"abort": 1, "length": 2}
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (15, 11)
    assert stats.pages_used == {"window": 0, "csa": 0, "hca": 0}


def test_events_and_the_chrome_trace(engine: Engine, tmp_path: Path) -> None:
    events: list[Event] = []
    trace = ChromeTrace(tmp_path / "trace.json")
    engine.listeners += [events.append, trace]
    engine.generate([PROMPT, PROMPT[1:]], PARAMS)
    engine.listeners.clear()
    trace.close()
    assert [e.kind for e in events if e.kind != "step"] == [
        *["added"] * 2,
        *["began"] * 2,
        *["finished"] * 2,
    ]
    steps = [e for e in events if e.kind == "step"]
    assert len(steps) == 5
    assert set(steps[0].values["phases_s"]) == {"schedule", "run", "accept"}
    written = json.loads((tmp_path / "trace.json").read_text())
    assert {e["ph"] for e in written} == {"b", "n", "e", "X", "C"}
    assert sum(e.get("name") == "step" for e in written) == 5
    begun = {e["id"] for e in written if e["ph"] == "b"}
    assert begun == {e["id"] for e in written if e["ph"] == "e"}
    assert all(e["ts"] >= 0 for e in written)


# --- the audit --------------------------------------------------------------------------------


def test_the_audit_runs_requests_again_and_answers_nobody(folder: Path, tmp_path: Path) -> None:
    engine = Engine.load(
        folder, max_context=400, max_sequences=2, audit_share=1.0, audit_folder=str(tmp_path)
    )
    answers = engine.generate([[7] * 140] * 3, PARAMS)
    ends = run(engine)
    assert not ends  # nobody hears of the second runs
    stats = engine.stats()
    assert (stats.num_audited, stats.num_differences) == (3, 0)
    assert stats.num_output_tokens == 3 * 5
    assert stats.num_finished == {"length": 3}
    assert any(answer.num_cached for answer in engine.generate([[7] * 140], PARAMS))
    assert len({answer.token_ids for answer in answers}) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_audit_sees_a_difference(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.load(
        folder, max_context=400, max_sequences=2, audit_share=1.0, audit_folder=str(tmp_path)
    )
    real = engine._runner.read

    def wrong(submitted: Any) -> list[list[TokenLogprobs]]:
        results = real(submitted)
        off = 0.0 if any(live.audits for live in engine._live.values()) else 1e-6
        return [[replace(r, logprob=r.logprob + off) for r in found] for found in results]

    monkeypatch.setattr(engine._runner, "read", wrong)
    with caplog.at_level(logging.ERROR):
        engine.generate([PROMPT, PROMPT[1:]], PARAMS)
        run(engine)
    assert engine.stats().num_differences >= 1
    assert "gave another answer" in caplog.text
    replay = json.loads((tmp_path / "difference-1.json").read_text())
    assert replay["request"]["prompt_ids"] in (PROMPT, PROMPT[1:])
    assert replay["seed"] == 3
    assert replay["answer"] != replay["answer_alone"]
    assert replay["settings"]["max_context"] == 400


@pytest.mark.parametrize(
    "choice",
    [{"audit_share": 2}, {"audit_share": "all"}, {"audit_folder": 3}, {"prefix_disk": 1}],
)
def test_bad_choices(choice: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(choice))):
        Engine.load("tiny", **choice)


def test_state_tokens_hold_at_least_one_sequence(folder: Path) -> None:
    with pytest.raises(OptionError, match="state_tokens is 100, expected at least the 400"):
        Engine.load(folder, max_context=400, state_tokens=100)


def test_a_request_whose_room_is_held_from_outside_gets_an_answer(folder: Path) -> None:
    engine = Engine.load(folder, device="cpu", max_context=400, max_sequences=1)
    scores = engine.score(PROMPT * 60)
    next(scores)
    [answer] = engine.generate([PROMPT], PARAMS)
    assert answer.finish_reason == "error"
    assert "score" in (answer.error or "")
    scores.close()  # type: ignore[attr-defined]
    assert engine.generate([PROMPT], PARAMS)[0].finish_reason == "length"
