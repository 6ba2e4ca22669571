"""`bench serve`: traffic, figures, steps, the picture, the record, and the client of the server."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dsv4 import Engine
from dsv4.cli import app
from dsv4.errors import OptionError
from dsv4.runner.experts.usage import ExpertProfile, read_profile
from dsv4.tools.speed.serving.http import engine_flags, replay_http, server_share, serving
from dsv4.tools.speed.serving.serve import (
    GPU_LENGTHS,
    GPU_LOADS,
    Measured,
    StepMark,
    bench_engine,
    run_alone,
    run_load,
)
from dsv4.tools.speed.serving.traffic import Arrival, Load, Stream, Traffic, summarise
from dsv4.tools.speed.timeline import LANES, picture
from tests.models import write_fast_model, write_quick_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quick_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine.load(folder, device="cpu", max_context=600, max_sequences=4)


# --- traffic ------------------------------------------------------------------------------------


def test_a_load_in_words() -> None:
    text = "rate=0.5, requests=3,in=9,out=2,shared=4,odd=1"
    assert Load.parse(text) == Load(0.5, 3, 9, 2, num_shared=4, odd=True)
    for bad, says in (
        ("rate=8,requests=48,in=512", "has no out"),
        ("rate=8,speed=3", "found 'speed=3'"),
        ("rate=x,requests=1,in=1,out=1", "found 'rate=x'"),
        ("rate=-1,requests=1,in=1,out=1", "expected a rate of 0 or more"),
        ("rate=1,requests=0,in=1,out=1", "at least 1 request"),
        ("rate=1,requests=1,in=4,out=1,shared=5", "at most in"),
    ):
        with pytest.raises(OptionError, match=says):
            Load.parse(bad)


def test_traffic_is_a_function_of_its_seed() -> None:
    load = Load(4.0, 300, 12, 5, num_shared=8)
    first, again = (Traffic(1000).arrivals(load) for _ in range(2))
    assert first == again
    assert first != Traffic(1000, seed=2).arrivals(load)
    assert [a.time_s for a in first] == sorted(a.time_s for a in first)
    assert first[-1].time_s == pytest.approx(300 / 4.0, rel=0.2)
    assert len({a.request.prompt_ids[:8] for a in first}) == 1
    assert len({a.request.prompt_ids[8:] for a in first}) == 300
    assert all(100 <= token < 900 for a in first for token in a.request.prompt_ids)
    assert {a.time_s for a in Traffic(50).arrivals(Load(0, 5, 3, 2))} == {0.0}


def test_the_loads_of_records_arrive_as_they_always_did() -> None:
    """Another order of random numbers would make records incomparable."""
    traffic = Traffic(129280)
    for length in GPU_LENGTHS:
        for _ in range(3):
            traffic.request(length, 1)
    last = [traffic.arrivals(load)[-1].time_s for load in GPU_LOADS]
    assert last == pytest.approx([7.7926, 6.0737, 3.4061, 4.3593, 6.4865], abs=1e-4)


def test_one_request_in_eight_is_odd() -> None:
    params = [a.request.params for a in Traffic(1000).arrivals(Load(0, 32, 2, 2, odd=True))]
    assert params[0].presence_penalty == params[24].presence_penalty == 0.5
    assert params[8].logit_bias == {7: 1.0}
    assert params[16].logprobs == 5
    plain = [p for place, p in enumerate(params) if place % 8]
    assert all((p.presence_penalty, p.logit_bias, p.logprobs) == (0.0, {}, None) for p in plain)


# --- figures ------------------------------------------------------------------------------------


def test_figures() -> None:
    streams = [Stream(0.1 * i, 100, [0.1 * i + 0.5, 0.1 * i + 0.7], 3, 50) for i in range(100)]
    streams[0].times_s = [0.2, 9.2]
    streams[99].error = "broken"
    result = summarise(Load(10, 100, 100, 3), "engine", streams, 20.0)
    assert (result.tokens_per_s, result.offered_tokens_per_s, result.hit_rate) == (15.0, 30.0, 0.5)
    assert result.last_arrival_s == pytest.approx(9.9)
    assert result.most_tokens_per_s == pytest.approx(300 / 9.9, abs=0.1)
    assert result.first_ms == {"p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert result.gap_ms == {"p50": 200.0, "p90": 200.0, "p99": 9000.0}
    assert result.token_ms["p50"] == 100.0
    assert (result.num_failed, result.errors) == (1, ["broken"])


def test_the_server_s_share() -> None:
    def result(pace_s: float) -> Any:
        stream = Stream(0.0, 4, [1.0, 1.0 + 2 * pace_s, 1.0 + 3 * pace_s], 4)
        return summarise(Load(0, 1, 4, 4), "engine", [stream], 2.0)

    share = server_share(result(0.010), result(0.0125))
    assert (share.http_token_ms, share.engine_token_ms, share.server_ms) == (12.5, 10.0, 2.5)
    broken = summarise(Load(0, 1, 4, 4), "http", [Stream(0, 4, error="out of room")], 2.0)
    with pytest.raises(OptionError, match="out of room"):
        server_share(result(0.01), broken)


# --- the engine ---------------------------------------------------------------------------------


def test_every_token_of_a_load_is_in_its_steps(engine: Engine) -> None:
    load = Load(0, 6, 20, 3)
    measured = run_load(engine, Traffic(engine.config.vocab_size), load)
    result, steps = measured.result, measured.steps
    assert (result.output_tokens, result.num_failed) == (18, 0)
    assert sum(step.num_prompt for step in steps) == 6 * 20
    assert sum(step.num_decode for step in steps) == 6 * 2  # but for first tokens
    assert max(step.num_decode for step in steps) == 4
    assert result.num_steps == len(steps)
    assert result.num_prompt_steps == sum(step.num_prompt > 0 for step in steps) < len(steps)
    assert all(a.end_s == b.begin_s for a, b in itertools.pairwise(steps))
    assert engine.listeners == []


def test_shared_beginnings_are_hits_and_a_prompt_alone_is_once_more(engine: Engine) -> None:
    traffic = Traffic(engine.config.vocab_size)
    alone = run_alone(engine, traffic, 300)
    assert alone.num_cached == 256
    assert alone.first_ms > 0
    assert alone.gap_ms > 0
    measured = run_load(engine, traffic, Load(0, 4, 300, 2, num_shared=256), watch=False)
    assert measured.result.hit_rate > 0
    assert measured.result.num_steps is None


def test_failed_requests_and_warnings_are_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OptionError("no such luck")

    monkeypatch.setattr(engine._runner, "submit", fail)
    said: list[str] = []
    rows = list(bench_engine(engine, [], [Load(0, 2, 4, 2)], said.append))
    assert isinstance(rows[0], Measured)
    assert (rows[0].result.num_failed, rows[0].result.errors) == (2, ["no such luck"])
    assert rows[0].result.first_ms == {}
    assert rows[1].count == 1  # type: ignore[union-attr]
    assert said == ["all at once, 2 requests, 4 in, 2 out"]
    with pytest.raises(OptionError, match="max_context is 600"):
        list(bench_engine(engine, [], [Load(0, 1, 600, 1)], said.append))


# --- the picture --------------------------------------------------------------------------------


def test_the_picture_shows_every_load() -> None:
    steps = [StepMark(0.0, 0.08, 512, 0), StepMark(0.08, 0.09, 0, 31), StepMark(0.5, 0.51, 0, 7)]
    stream = Stream(0.0, 4, [0.08, 0.09], 2)
    result = summarise(Load(8, 1, 512, 2), "engine", [stream], 1.0)
    text = picture([Measured(Load(8, 1, 512, 2), result, steps, [0.0, 0.4])] * 2, 60.0)
    root = ElementTree.fromstring(text)
    words = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    for lane, most in zip(LANES, ("512", "31", "80"), strict=True):
        assert words.count(lane.name) == words.count(most) == 2
    assert words.count("60") == 2  # the bound of a gap, below the longest step
    assert "8 a second, 1 requests, 512 in, 2 out" in words
    assert len(picture([Measured(Load(8, 1, 512, 2), result, steps * 1000, [])], 60.0)) < 30_000


# --- the command --------------------------------------------------------------------------------

ALONE = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "uvicorn", "httpx"):
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Block())
from dsv4.cli import main
main()
"""


def test_the_command_needs_no_server_and_writes_a_record_and_a_picture(
    folder: Path, tmp_path: Path
) -> None:
    record, plot = tmp_path / "new" / "record.jsonl", tmp_path / "plot.svg"
    loads = ["--load", "rate=0,requests=2,in=5,out=3", "--load", "rate=99,requests=1,in=5,out=2"]
    options = ["--device", "cpu", "--record", str(record), "--plot", str(plot)]
    command = [sys.executable, "-c", ALONE, "bench", "serve", str(folder), *loads, *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "0 warnings after ready" in result.stdout
    assert f"drawn in {plot}" in result.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    kinds = [next(iter(line)) for line in lines]
    assert kinds == ["run", "ready", "load", "load", "warnings"]
    assert "max_sequences=64" in lines[1]["ready"]["settings"]
    assert [line["load"]["output_tokens"] for line in lines[2:4]] == [6, 2]
    assert lines[3]["load"]["most_tokens_per_s"] > 0
    ElementTree.fromstring(plot.read_text())


def test_a_shape_is_tried_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4.tools.speed.serving.serve.CPU_LENGTHS", (5, 9000))
    monkeypatch.setattr("dsv4.tools.speed.serving.serve.CPU_ALONE_OUTPUT", 2)
    monkeypatch.setattr("dsv4.tools.speed.serving.serve.CPU_LOADS", (Load(0, 2, 5, 2, odd=True),))
    command = ["bench", "serve", "--shape", "trial", "--layers", "3", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [next(iter(row)) for row in rows] == ["ready", "alone", "load", "warnings"]
    assert rows[0]["ready"]["model"] == "trial, 3 random layers"
    assert rows[1]["alone"]["num_prompt"] == 5  # 9,000 tokens do not fit
    assert rows[2]["load"]["num_failed"] == 0


def test_bench_writes_the_profile_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    command = ["bench", "serve", "--shape", "trial", "--layers", "2", "--device", "cpu"]
    command += ["--expert-memory", "0.0001", "--expert-profile", str(path)]
    result = CliRunner().invoke(app, [*command, "--load", "rate=0,requests=2,in=5,out=4"])
    assert result.exit_code == 0, result.output
    assert (
        read_profile(ExpertProfile(path, "any", "random"), 2, 8).sum(1) > 8
    ).all()  # two experts or more in every step


def test_wrong_use() -> None:
    for options, says in (
        (["--load", "8x48"], "expected rate=8"),
        (["--shape", "huge"], "huge"),
        (["--shape", "trial", "--layers", "9"], "layers is 9"),
        (["--shape", "trial", "--dtype", "float32"], "expected bfloat16"),
        (["--shape", "trial", "--ops", "nothing"], "nothing"),
        (["--layers", "2"], "--shape"),
        (["--shape", "trial", "--http"], "leave --shape out"),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", "--device", "cpu", *options])
        assert isinstance(result.exception, OptionError), options
        assert says in str(result.exception)


# --- through the server -------------------------------------------------------------------------


def test_engine_options_as_flags() -> None:
    choices = {"device": "cpu", "max_context": 600, "prefix_cache": False, "cuda_graphs": True}
    flags = ["--device", "cpu", "--max-context", "600", "--no-prefix-cache"]
    assert engine_flags(choices) == flags


def replies(answer: Callable[[dict[str, Any]], bytes], arrivals: list[Arrival]) -> list[Stream]:
    """What the client makes of a server's raw bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        writer.write(answer(json.loads(await reader.readexactly(length))))
        writer.close()

    async def run() -> list[Stream]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            streams, _ = await asyncio.to_thread(replay_http, address, arrivals)
            return streams

    return asyncio.run(run())


def test_the_client_reads_streams_and_notices_broken_ones() -> None:
    def chunks(*parts: bytes) -> bytes:
        return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)

    good = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    token = b'data: {"choices":[{"text":"a"}]}\n\n'
    usage = b'"usage":{"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
    end = b'data: {"choices":[],' + usage + b"data: [DONE]\n\n"
    answers = [
        good + chunks(b": keep-alive\n\n" + token[:9], token[9:] + token, end) + b"0\r\n\r\n",
        good + chunks(token, b'data: {"error":{"message":"lost"}}\n\n') + b"0\r\n\r\n",
        good + chunks(token),
        b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy",
        b"",
    ]
    asked = []

    def answer(body: dict[str, Any]) -> bytes:
        asked.append(body)
        return answers[body["seed"] - 1]

    arrivals = Traffic(1000).arrivals(Load(0, 5, 3, 2, odd=True))
    first, *bad = replies(answer, arrivals)
    assert (first.error, len(first.times_s), first.num_tokens, first.num_cached) == (None, 2, 2, 1)
    errors = [stream.error for stream in bad]
    expected = ("lost", "0 of 2 tokens came", "status 429 Too Many Requests: busy", "closed")
    assert all(text in str(error) for text, error in zip(expected, errors, strict=True)), errors
    body = next(body for body in asked if body["seed"] == 1)
    assert body["prompt"] == list(arrivals[0].request.prompt_ids)
    assert (body["presence_penalty"], body["ignore_eos"], body["stream"]) == (0.5, True, True)


def test_the_same_load_through_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DSV4_API_KEY", "of another server")
    folder = write_fast_model(tmp_path / "model")
    options = ["--load", "rate=0,requests=9,in=5,out=4,odd=1", "--max-context", "64"]
    command = ["bench", "serve", str(folder), "--http", "--device", "cpu", *options, "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [next(iter(row)) for row in rows] == ["ready", "load", "warnings", "load", "share"]
    engine, http, share = rows[1]["load"], rows[3]["load"], rows[4]["share"]
    assert (engine["via"], http["via"]) == ("engine", "http")
    assert engine["output_tokens"] == http["output_tokens"] == 36
    assert http["errors"] == []
    difference = http["token_ms"]["p50"] - engine["token_ms"]["p50"]
    assert share["server_ms"] == pytest.approx(difference, abs=0.002)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(OptionError, match=r"did not start: .*nowhere"),
        serving(str(tmp_path / "nowhere"), {}, 1),
    ):
        raise AssertionError("it is not there")
