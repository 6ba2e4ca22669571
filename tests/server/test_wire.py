"""What passes between the two processes comes out as it went in; unread outputs have a limit."""

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.chat import V4_OFFICIAL, encode_prompt
from dsv4.errors import OptionError, RankError
from dsv4.request import Guide, Output, Request, SamplingParams, TokenLogprobs
from dsv4.server.answers import Answers
from dsv4.server.api_error import ApiError
from dsv4.server.generation import GenerationPlan
from dsv4.server.metrics import RequestRecord
from dsv4.server.options import ServerOptions
from dsv4.server.service import Service
from dsv4.server.worker import main as engine_module
from dsv4.server.worker.link import MAX_TOKENS, EngineLink
from dsv4.server.worker.mailbox import MAX_UNREAD, Mailbox, Scores
from dsv4.server.worker.main import Worker, _Scoring
from dsv4.server.worker.main import main as engine_main
from dsv4.server.worker.wire import (
    QUICK_IDS,
    Channel,
    ids_to_wire,
    output_from_wire,
    output_to_wire,
    pack,
    pack_prompt,
    request_from_wire,
    request_to_wire,
)
from tests.server.support import in_background

REQUESTS = [
    Request("a", (1, 2, 3)),
    Request(
        "b",
        (7,),
        SamplingParams(
            max_tokens=3,
            temperature=0.25,
            logit_bias={5: -1.5},
            seed=-(2**63),
            stop=("x", "ü"),
            stop_ids=(1, 2),
            logprobs=0,
            guide=Guide("json_schema", {"type": "object"}, after_id=4),
        ),
        priority=3,
        deadline=1.5,
        cache_salt="s",
    ),
    Request("c", (1,), SamplingParams(guide=Guide("choice", ["a", "b"]), stop_ids=())),
]
OUTPUTS = [
    Output("a", (1,), "é"),
    Output("b", (), "", "error", error="broken", refused=True, num_cached=0),
    Output("b", (), "", "error", error="NaN", error_code="numerics_error"),
    Output("c", (1, 2), "x", "stop", "x", (TokenLogprobs(1, -0.5, ((2, -1.0),)),), num_cached=3),
]


@pytest.fixture
def channels() -> Any:
    left, right = socket.socketpair()
    with left, right:
        yield Channel(left), Channel(right)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.id)
def test_requests(channels: Any, request_: Request) -> None:
    here, there = channels
    here.send(request_to_wire(request_))
    assert request_from_wire(there.receive()) == request_


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.request_id)
def test_outputs(channels: Any, output: Output) -> None:
    here, there = channels
    here.send(output_to_wire(output))
    assert output_from_wire(there.receive()) == output


def test_long_prompts_are_written_beside_the_event_loop() -> None:
    threads = []

    def make() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"kind": "add"}

    for ids in (range(QUICK_IDS), range(QUICK_IDS + 1)):
        assert asyncio.run(pack_prompt(ids, make)) == pack({"kind": "add"})
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_scores_of_a_long_prompt_come_in_pieces(
    channels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of one chunk of a prompt are many times what one message may hold."""
    here, there = channels
    rng = torch.Generator().manual_seed(1)
    chunks = [torch.randn(count, 64, generator=rng) for count in (1500, 700)]
    ids = torch.randint(64, (2200,), generator=rng).tolist()
    engine = SimpleNamespace(listeners=[], num_unfinished=0, score=lambda ids: iter(chunks))
    worker = Worker(engine, here, SimpleNamespace())  # type: ignore[arg-type]
    worker._scores.append(_Scoring({"id": "a", "ids": ids_to_wire(ids), "top": 20}))
    monkeypatch.setattr("dsv4.server.worker.wire.MAX_MESSAGE_BYTES", 300_000)

    async def read() -> list[TokenLogprobs]:
        scores, sizes = Scores(), []
        while not scores.answer.done():
            message = await asyncio.to_thread(there.receive)
            assert message is not None, "the engine broke off"
            sizes.append(len(json.dumps(message)))
            scores.deliver(message)
        assert len(sizes) > 10
        assert sum(sizes) > 3 * 300_000
        return scores.found

    def send() -> None:
        try:
            while worker._scores:
                worker._score_on()
        finally:
            here._connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    found = asyncio.run(read())
    thread.join()
    expected = torch.log_softmax(torch.cat(chunks)[: len(ids) - 1], -1)
    assert [item.token_id for item in found] == ids[1:]
    chosen = expected.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert torch.equal(torch.tensor([item.logprob for item in found]), chosen)
    assert all(len(item.top) == 20 for item in found)
    best = torch.tensor([item.top[0][1] for item in found])
    assert torch.equal(best, expected.max(1).values)


def test_the_end_of_the_line() -> None:
    left, right = socket.socketpair()
    with right:
        left.sendall(b"\0\0\0\5ab")  # broken off in the middle of a message
        left.close()
        assert Channel(right).receive() is None


def test_a_reader_that_never_reads_is_cut_off() -> None:
    async def run() -> None:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        box = Mailbox(link)
        taken = [box.deliver(Output("a", (1,), "x")) for _ in range(MAX_UNREAD + 1)]
        assert taken == [True] * MAX_UNREAD + [False]
        with pytest.raises(ApiError, match="not read"):
            await box.next(1)

    asyncio.run(run())


def test_a_late_reader_gets_several_steps_at_once() -> None:
    """One output for each request and nothing lost: a busy server writes less often."""

    async def run() -> list[Output]:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        box = Mailbox(link)
        scored = (TokenLogprobs(7, -0.5),)
        box.deliver(Output("a", (7,), "x", logprobs=scored, num_cached=3))
        box.deliver(Output("b", (9,), "u"))
        box.deliver(Output("a", (7,), "y", logprobs=scored))
        box.deliver(Output("a", (7, 1), "", "stop", 1, logprobs=scored * 2))
        return await box.next(1)

    first, second = asyncio.run(run())
    scored = (TokenLogprobs(7, -0.5),) * 4
    assert first == Output("a", (7, 7, 7, 1), "xy", "stop", 1, scored, num_cached=3)
    assert second == Output("b", (9,), "u")


def test_a_late_chat_reader_gets_one_piece_of_text() -> None:
    async def run() -> list[Any]:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        link.state, link.facts = "ready", {"dialect": V4_OFFICIAL.name}
        service = Service("tiny", ServerOptions(), link)
        prompt = encode_prompt([{"role": "user", "content": "x"}], dialect=V4_OFFICIAL, mode="chat")
        record = RequestRecord("id", "path", "tiny")
        answers = Answers(service, GenerationPlan(prompt, (1,), SamplingParams()), record)
        for token in service.tokenizer.encode("one two three"):
            answers._box.deliver(Output(f"{record.key}-0-0", (token,), ""))
        answers._box.deliver(Output(f"{record.key}-0-0", (), "", "length"))
        return [delta async for some in answers.updates() for one in some for delta in one.deltas]

    assert [(delta.kind, delta.text) for delta in asyncio.run(run())] == [
        ("content", "one two three")
    ]


def test_too_many_waiting_tokens() -> None:
    async def run() -> None:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        link.state, link.facts = "ready", {"max_sequences": 4}
        link.check_room(5)
        box = Mailbox(link)
        box.num_tokens = MAX_TOKENS + 1
        link._live["a"] = link._live["b"] = box
        with pytest.raises(ApiError, match="prompt tokens") as caught:
            link.check_room(1)
        assert caught.value.status_code == 429

    asyncio.run(run())


def test_what_comes_behind_a_stop_string_is_dropped() -> None:
    """A slow client finds many outputs at once, also of an answer that is over."""

    async def run() -> list[Any]:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        link.state, link.facts = "ready", {"dialect": V4_OFFICIAL.name}
        service = Service("tiny", ServerOptions(), link)
        prompt = encode_prompt([{"role": "user", "content": "x"}], dialect=V4_OFFICIAL, mode="chat")
        order = GenerationPlan(prompt, (1,), SamplingParams(), stops=("STOP",))
        record = RequestRecord("id", "path", "tiny")
        answers = Answers(service, order, record)
        for token in service.tokenizer.encode("one STOP two three"):
            answers._box.deliver(Output(f"{record.key}-0-0", (token,), ""))
        found = [update async for updates in answers.updates() for update in updates]
        assert answers.choices[0].result.content == "one "
        return found

    steps = asyncio.run(run())
    assert [step.is_last for step in steps].count(True) == 1
    assert steps[-1].is_last


def test_an_engine_that_cannot_listen_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory while it reads: its loop must not go on, deaf, while requests wait."""
    ends: list[int] = []
    monkeypatch.setattr("os._exit", ends.append)

    def worker(error: type[BaseException]) -> Worker:
        def fail() -> None:
            raise error

        engine, channel = SimpleNamespace(listeners=[]), SimpleNamespace(receive=fail)
        return Worker(engine, channel, SimpleNamespace())  # type: ignore[arg-type]

    worker(MemoryError)._read()
    assert ends == [1]
    left = worker(ConnectionResetError)
    left._read()
    assert ends == [1]
    assert left._inbox.get_nowait() is None  # the web process went: prefixes are written


def test_a_loading_engine_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is ready nothing else tells a long load from a stopped process."""
    is_heard = threading.Event()

    def load(*_: Any) -> Any:
        assert is_heard.wait(100)
        raise OptionError("enough")

    monkeypatch.setattr("dsv4.server.worker.main._load", load)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours)
        channel.send({"kind": "load", "log_level": 30})
        end = in_background(lambda: engine_main(["engine", str(theirs.detach())]))
        assert channel.receive() == {"kind": "beat", "age": 0.0}
        is_heard.set()
        assert end.result(100) == OptionError.exit_code


@pytest.mark.parametrize(("silence", "is_ended"), [(200.0, False), (400.0, True)])
def test_an_engine_that_is_silent_while_it_loads_is_ended(silence: float, is_ended: bool) -> None:
    ends: list[str] = []

    async def run() -> None:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        link.state = "restarting"
        link._heard_at = link._turned_at = time.monotonic() - silence
        process: Any = SimpleNamespace(kill=lambda: ends.append("killed"))
        await asyncio.wait([asyncio.create_task(link._watch(process))], timeout=2)

    asyncio.run(run())
    assert ends == ["killed"] * is_ended


@pytest.mark.parametrize(
    ("ranks", "seconds", "is_ended"),
    [((), 70.0, True), (({"rank": 1},), 70.0, False), (({"rank": 1},), 100.0, True)],
)
def test_several_ranks_may_name_who_hangs_first(
    ranks: tuple[Any, ...], seconds: float, is_ended: bool
) -> None:
    ends: list[str] = []

    async def run() -> None:
        link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
        link.state, link.stats = "ready", {"ranks": ranks}
        link._turned_at = time.monotonic() - seconds
        process: Any = SimpleNamespace(kill=lambda: ends.append("killed"))
        await asyncio.wait([asyncio.create_task(link._watch(process))], timeout=0.8)
        assert ("no progress" in link._ending) == is_ended

    asyncio.run(run())
    assert ends == ["killed"] * is_ended


@pytest.mark.parametrize(("turned_at", "kind"), [(None, "failed"), (1.0, "ending")])
def test_a_failed_rank_ends_the_engine_process(
    monkeypatch: pytest.MonkeyPatch, turned_at: float | None, kind: str
) -> None:
    """While it loads, nothing has to be started again."""
    codes: list[int] = []
    monkeypatch.setattr(engine_module, "END_SECONDS", 0.0)
    monkeypatch.setattr(engine_module.os, "_exit", codes.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        heartbeat: Any = SimpleNamespace(turned_at=turned_at)
        engine_module._end_with_ranks(RankError("rank 1 is gone"), Channel(ours), heartbeat)
        message = Channel(theirs).receive()
    assert message is not None
    assert (message["kind"], message["error"]) == (kind, "rank 1 is gone")
    assert codes == [70]


def test_requests_end_before_their_engine_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes its time to end keeps nobody waiting, and nobody comes in."""
    link = EngineLink("tiny", {"prefix_disk": "x"}, lambda message: None, max_waiting=1)
    seen: list[Any] = []

    async def end_process(seconds: float) -> None:
        assert link._supervisor is not None
        link._supervisor.cancel()
        seen.append((link.state, link.num_live, seconds < 5))
        with pytest.raises(ApiError) as caught:
            link.check_ready()
        seen.append(caught.value.code)

    async def run() -> None:
        link.facts, link.state, box = {"max_context": 1}, "ready", link.open()
        link._live["a"] = box
        await link.start()
        assert link._supervisor is not None
        await asyncio.wait([link._supervisor])
        with pytest.raises(ApiError, match="restarted"):
            await box.next(1)

    monkeypatch.setattr(link, "_run_once", lambda: asyncio.sleep(0))
    monkeypatch.setattr(link, "_end_process", end_process)
    asyncio.run(run())
    assert seen[:2] == [("restarting", 0, True), "restarting"]


@pytest.mark.parametrize(
    ("answers", "pauses"), [(True, [0.2] * 4), (False, [1.0, 5.0, 30.0, 30.0])]
)
def test_an_engine_that_answers_is_restarted_at_once(
    monkeypatch: pytest.MonkeyPatch, answers: bool, pauses: list[float]
) -> None:
    """One that keeps dying before it was of use to anybody is restarted more and more slowly."""
    link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
    link.facts = {"max_context": 1}
    found: list[float] = []

    async def run_once() -> None:
        if answers:
            link._live["a"] = link.open()
            link._on_message(
                {"kind": "outputs", "outputs": [{"id": "a", "tokens": [], "finish": "stop"}]}
            )

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        if len(found) == len(pauses):
            raise asyncio.CancelledError

    monkeypatch.setattr(link, "_run_once", run_once)
    monkeypatch.setattr("dsv4.server.worker.link.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(link._supervise())
    assert found == pauses


def test_a_message_without_sense_restarts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.server.worker.link.BACKOFF_SECONDS", (0.0,))
    link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
    link.facts = {"max_context": 1}
    starts = 0

    async def run_once() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise ValueError("not JSON")
        link._supervisor.cancel()  # type: ignore[union-attr]
        await asyncio.sleep(1)

    monkeypatch.setattr(link, "_run_once", run_once)

    async def supervise() -> None:
        await link.start()
        assert link._supervisor is not None
        await asyncio.wait([link._supervisor])

    asyncio.run(supervise())
    assert starts == 3


def test_cached_prefixes_are_reported_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of replicas looks for these keys; the message has up to some kilobytes."""
    keys = [b"\xbb", b"\xaa"]
    sent: list[Any] = []
    engine = SimpleNamespace(listeners=[], cached_prefixes=lambda: keys)
    monkeypatch.setattr("dsv4.server.worker.main._stats", lambda _: {"kind": "stats", "stats": {}})
    monkeypatch.setattr("dsv4.server.worker.main.STATS_SECONDS", 0.0)
    worker = Worker(engine, SimpleNamespace(send=sent.append), SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(3):
        worker._send_stats()
    keys.pop()
    worker._send_stats()
    link = EngineLink("tiny", {}, lambda message: None, max_waiting=1)
    reports = [message for message in sent if message["kind"] == "prefixes"]
    for message in reports:
        link._on_message(message)
    assert [message["keys"] for message in reports] == ["aabb", "bb"]
    assert link.prefix_keys == "bb"
