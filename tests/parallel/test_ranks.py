"""Ranks as processes over Gloo: the answers of one process, and failures that name the rank.

The processes come from one fork server, so torch is imported once for all tests of this file.
"""

import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.cache.fingerprint import sampled_digest
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import KernelError, OptionError, RankError
from dsv4.parallel import fork_server
from dsv4.parallel import team as team_module
from dsv4.parallel.commands import Link
from dsv4.parallel.fork_server import ForkServer, Member, how_it_ended
from dsv4.parallel.layout import allowed_tp
from dsv4.request import Request, SamplingParams
from dsv4.runner.drafts import verify
from dsv4.runner.ranks import start, state_copier
from dsv4.runner.ranks.versions import code_digest, differences, versions
from dsv4.runner.runner import Runner
from dsv4.tools.doctor import parallel as doctor
from dsv4.util.models import model_folder
from tests.models import verify_everything

PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=5, logprobs=3)
BUSY_SECONDS = (
    15.0  # what a busy machine may add; every step_timeout that must not matter is longer
)
PROMPTS = ([7, 8, 9], list(range(1, 140)), [3], list(range(1, 133)))


def answers(engine: Engine) -> Any:
    """Sampled tokens and log-probabilities in one batch, a cached prefix, and every logit."""
    found = engine.generate(list(PROMPTS), PARAMS)
    again = engine.generate([PROMPTS[1]], PARAMS)  # begins with a snapshot
    logits = torch.cat(list(engine.score(PROMPTS[1])))
    engine.check_integrity()
    return [(c.token_ids, c.logprobs) for c in [*found, *again]], logits


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return answers(Engine.load(folder, device="cpu"))


@pytest.mark.parametrize(
    ("tp", "pp", "experts"), [(2, 1, "split"), (4, 1, "whole"), (8, 2, "whole")]
)  # more of pp: test_lanes.py
def test_ranks_answer_like_one_process(
    folder: Path, alone: Any, tp: int, pp: int, experts: str
) -> None:
    engine = Engine.load(folder, device="cpu", tp=tp, pp=pp, experts=experts)
    try:
        tokens, logits = answers(engine)
        assert tokens == alone[0]
        assert torch.equal(logits, alone[1])
        fullest, every = engine.stats().expert_pairs  # split experts are even
        assert every / tp < fullest < every if experts == "whole" else every == 0
    finally:
        engine.close()


@pytest.mark.parametrize(("width", "experts"), [("a8", "whole"), ("a4", "split")])
def test_rounded_activations(width: str, experts: str) -> None:
    """With a4 a row has one scale, so `wo_b` needs all columns of it; the model is NVFP4."""
    found = []
    for choices in ({}, {"tp": 2, "experts": experts}):
        engine = Engine.load("tiny", device="cpu", activations=width, draft="off", **choices)
        try:
            found.append(answers(engine))
        finally:
            engine.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_drafts_from_lookup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify steps run on all ranks; tokens are drawn row by row, and all rows together."""
    loop = [5, 6, 7, 8, 9, 10] * 12
    prompts = [loop, [*loop[:40], 3], [4] * 30]
    bias = dict.fromkeys(range(11, 271), -100.0)  # answers that repeat themselves
    kinds = [
        SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, stop_ids=(), logit_bias=bias),
        SamplingParams(max_tokens=12, seed=4, temperature=0.5, stop_ids=(), logit_bias=bias),
        SamplingParams(max_tokens=12, seed=4, stop_ids=(), frequency_penalty=0.2, logit_bias=bias),
    ]

    def found(engine: Engine) -> Any:
        answers = [engine.generate(prompts, params) for params in kinds]
        engine.check_integrity()
        return [(a.token_ids, a.logprobs) for batch in answers for a in batch]

    alone = found(Engine.load(folder, device="cpu", draft="off"))
    engine = Engine.load(folder, device="cpu", tp=2, draft="lookup")
    assert engine._drafting is not None
    verify_everything(engine._drafting)
    try:
        for together in (False, True):
            monkeypatch.setattr(verify, "TOGETHER_ON_CPU", together)
            before = engine.stats().num_accepted
            assert found(engine) == alone
            assert engine.stats().num_accepted > before + 5
            assert engine.stats().num_drafted > engine.stats().num_accepted  # some were wrong
    finally:
        engine.close()
    # as on a GPU: while drafting rests or finds nothing, steps are queued ahead
    monkeypatch.setattr(Runner, "runs_ahead", True)
    engine = Engine.load(folder, device="cpu", tp=2, draft="lookup")
    try:
        assert found(engine) == alone
    finally:
        engine.close()


def test_preempted_sequences_go_on_alike(folder: Path) -> None:
    """Sequences outgrow the pages: one is preempted and its tokens are computed again."""
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=3, stop_ids=())
    prompts, found = [list(range(first, 120)) for first in (1, 2, 3)], []
    for layout in ({}, {"tp": 2, "pp": 2}):
        engine = Engine.load(
            folder, device="cpu", max_context=256, state_tokens=256, max_sequences=3, **layout
        )
        try:
            answers = engine.generate(prompts, params)
            assert engine.stats().num_preemptions > 0
            found.append([answer.token_ids for answer in answers])
            engine.check_integrity()
        finally:
            engine.close()
    assert found[0] == found[1]


def test_the_doctor_of_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SIZES", (4096,))
    monkeypatch.setattr(doctor, "STEPS", 6)
    monkeypatch.setattr(doctor, "TEXTS", ("ab", "Once upon a time " * 8))
    said: list[str] = []
    choices = EngineConfig(device="cpu", tp=2, pp=2)
    report = doctor.examine_ranks(str(folder), choices, said.append)
    assert report.ok
    assert (report.tp, report.pp, report.num_tokens) == (2, 2, 36)
    assert report.num_logits > 271 * 136  # of every token of the longer text
    [exchange] = report.exchanges
    assert exchange.gather_us > 0
    assert exchange.send_us > 0
    assert {"decode step, batch 1", "decode step, batch 8"} < report.times.keys()
    assert 1.0 <= report.fullest_share <= 2.0
    wanted = ([((1, 2), "a"), ((3,), "b")], torch.zeros(4, 5))
    found = ([((1, 2), "x"), ((4,), "b")], torch.eye(4, 5))
    assert list(doctor._differences(wanted, found)) == [
        "answer 0: the same tokens with other log-probabilities",
        "answer 1: tokens (4,), expected (3,)",
        "logits differ in 4 of 4 rows, by up to 1",
    ]
    with pytest.raises(OptionError, match="tp x pp is 1, expected several ranks"):
        doctor.examine_ranks(str(folder), EngineConfig(device="cpu", tp=1), said.append)


@pytest.mark.parametrize(
    ("gpus", "layout"),
    [(2, (2, 1)), (3, (1, 3)), (4, (4, 1)), (8, (8, 1)), (5, (1, 5)), (6, (2, 3)), (16, (8, 2))],
)
def test_the_doctor_uses_many_gpus(gpus: int, layout: tuple[int, int]) -> None:
    assert doctor.default_layout(gpus, 6) == layout


def test_the_doctor_has_a_model_for_eight_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only for ranks that the embedded model refuses, and before anything is loaded."""
    asked: list[tuple[str, Any, list[int]]] = []

    def compare(model: str, choices: EngineConfig, tell: Any) -> doctor.ParallelReport:
        config = ModelConfig.from_folder(model_folder(model))
        asked.append((model, choices.tp, allowed_tp(config)))
        return doctor.ParallelReport(2, 1, "cpu")

    monkeypatch.setattr(doctor, "_compare", compare)
    found = {}
    for tp in (2, 8):
        choices = EngineConfig(device="cpu", tp=tp)
        found[tp] = doctor.examine_ranks("tiny", choices, lambda text: None).model
    assert found == {2: "the embedded model", 8: "a random model"}
    assert [allowed for _, _, allowed in asked] == [[1, 2], [1, 2, 4, 8]]
    assert not Path(asked[1][0]).exists()
    with pytest.raises(OptionError, match=r"tp is 4 on 2 nodes, expected one of \[1, 2\]"):
        doctor.examine_ranks("tiny", EngineConfig(tp=4, nodes=2, head="h:1"), lambda text: None)


def test_prefixes_on_disk(folder: Path, tmp_path: Path) -> None:
    """Written by one rank or by two, read by the other: the answers of a cold start."""
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=5, logprobs=3)
    prompt = list(range(1, 200))
    found = []
    for turn, tp in enumerate((2, 2, 1)):
        engine = Engine.load(folder, device="cpu", tp=tp, prefix_disk=str(tmp_path))
        try:
            [answer] = engine.generate([prompt], params)
            found.append((answer.token_ids, answer.logprobs))
            assert answer.num_cached == (0 if turn == 0 else 128)
            engine.check_integrity()
        finally:
            engine.close()
    assert found[0] == found[1] == found[2]


def test_ranks_of_a_process_with_many_descriptors(
    folder: Path, many_open: None, loaded: list[Engine]
) -> None:
    engine = load(folder, loaded)
    assert engine._runner.team is not None
    assert engine._runner.team.members[0].connection.fileno() > 1023
    assert len(engine.generate([[5, 6, 7]], PARAMS)[0].token_ids) == 6
    server = ForkServer("dsv4.parallel.fork_server")  # its `main` takes no socket
    assert server._control.fileno() > 1023
    [pid], [connection] = server.start(1, BUSY_SECONDS)
    assert server.status(pid, BUSY_SECONDS) == 1
    connection.close()
    server._release()


def test_no_process_is_left_behind(folder: Path) -> None:
    engine = Engine.load(folder, device="cpu", tp=2, pp=2)
    pids = ranks_of(engine)
    assert len(pids) == 3
    assert all(map(is_running, pids))
    engine.close()
    assert not any(map(is_running, pids))
    engine.close()  # twice does no harm


def ranks_of(engine: Engine) -> list[int]:
    assert engine._runner.team is not None
    return engine._runner.team.pids


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # nobody may wait for an orphan


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "FOLLOWER", "tests.parallel.faulty")
    monkeypatch.setattr(team_module, "GRACE_SECONDS", 0.5)


@pytest.fixture
def loaded() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def load(folder: Path, loaded: list[Engine], fault: str = "", **choices: Any) -> Engine:
    engine = Engine.load(folder, device="cpu", tp=2, audit_folder=fault, **choices)
    loaded.append(engine)
    return engine


def check_broken(engine: Engine, pids: list[int], words: str, seconds: float = 0.0) -> None:
    """Requests end with the reason in this time, later ones too, and nothing runs any more."""
    for name in ("a", "b"):
        engine.add(Request(name, (5, 6, 7), SamplingParams(max_tokens=4000, stop_ids=())))
    errors, begin = dict[str, str](), time.monotonic()
    while engine.num_unfinished:
        for output in engine.step():
            if output.finish_reason == "error":
                errors[output.request_id] = output.error or ""
    assert errors.keys() == {"a", "b"}
    for error in errors.values():
        assert words in error
    assert time.monotonic() - begin < seconds + BUSY_SECONDS
    assert isinstance(engine.failure, RankError)
    assert engine.failure.exit_code == 70
    engine.close()
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped(
    folder: Path, faulty: None, loaded: list[Engine], sent: signal.Signals
) -> None:
    engine = load(folder, loaded, step_timeout=120.0 if sent == signal.SIGKILL else 6.0)
    pids = ranks_of(engine)
    timer = threading.Timer(0.3, os.kill, (pids[0], sent))
    timer.start()
    how = "was ended by signal 9 (SIGKILL)" if sent == signal.SIGKILL else "gave no sign of life"
    # a stop is silence, noticed after half of step_timeout; a death at once
    check_broken(
        engine, pids, f"rank 1 (process {pids[0]}) ", 3.0 if sent == signal.SIGSTOP else 0.0
    )
    assert how in str(engine.failure)
    timer.join()


def test_the_process_that_starts_ranks_is_killed(
    folder: Path, faulty: None, loaded: list[Engine]
) -> None:
    """Without it ranks cannot be killed, nor their end be known: a failure. They end with it."""
    engine = load(folder, loaded)
    pids, server = ranks_of(engine), ForkServer._known[os.getpid(), "tests.parallel.faulty"]
    timer = threading.Timer(0.3, server._process.kill)
    timer.start()
    check_broken(engine, pids, f"rank 1 (process {pids[0]}) is out of reach: the process that")
    timer.join()
    orphan = subprocess.Popen(["sleep", "600"])  # where the system kills no ranks
    server._started.append([orphan.pid])
    server.kill([orphan.pid])
    assert orphan.wait(BUSY_SECONDS) == -signal.SIGKILL
    late = subprocess.Popen(["sleep", "0.5"])  # killed, but the system takes its time
    assert server.status(late.pid, BUSY_SECONDS) is None
    assert not is_running(late.pid)
    late.wait()
    load(folder, loaded)  # by another one


def test_a_rank_that_hangs_is_named_in_time(
    folder: Path, faulty: None, loaded: list[Engine]
) -> None:
    """It answers pings. A server would end rank 0 after step_timeout, without the name."""
    engine = load(folder, loaded, "hangs", step_timeout=2.0)
    pids = ranks_of(engine)
    words = f"rank 1 (process {pids[0]}) did not finish command 3 within 1.8 s; raise step_timeout"
    check_broken(engine, pids, words, 2.0)


def test_signals_without_a_name() -> None:
    assert how_it_ended(-9) == "was ended by signal 9 (SIGKILL)"
    assert how_it_ended(-40) == "was ended by signal 40 (unnamed)"
    assert how_it_ended(3) == "ended with exit code 3"


class Host:
    is_gone = False

    def status(self, pid: int, timeout: float) -> int | None:
        return None

    def kill(self, pids: list[int]) -> None:
        pass


@pytest.fixture
def far_ends() -> Iterator[list[Link]]:
    ends: list[Link] = []
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def team(far_ends: list[Link]) -> Iterator[team_module.Team]:
    """Of ranks 1 and 2, which say nothing, in a step that may take 1,000 s."""
    pairs = [socket.socketpair() for _ in range(2)]
    far_ends += [Link(theirs) for _, theirs in pairs]
    members = [Member(10 + i, ours, Host()) for i, (ours, _) in enumerate(pairs, 1)]
    made = team_module.Team(members, 1000.0)
    made.ready()
    yield made
    made.close()


def look(team: team_module.Team, seconds: float, *heard: float, finished: int = 0) -> str:
    """What the watch finds after `seconds`, having heard of the ranks at these times."""
    begin = time.monotonic()
    with team._changed:
        for rank, then in zip(team._ranks, heard, strict=True):
            rank.last_message = begin + then
        if finished:
            team._ranks[0].finished, team._ranks[0].moved = finished, begin + 500
        team._look_at_clocks(begin + seconds)
    return str(team.failure or "")


def test_a_rank_that_stops_in_a_slow_step_is_named_in_time(team: team_module.Team) -> None:
    """Half of step_timeout after its last word would be too late."""
    team.command("share")
    assert look(team, 890, 880, 600) == ""
    assert look(team, 910, 900, 600).startswith(
        "rank 2 (process 12) gave no sign of life for 310.0 s; last finished command 0 of 1"
    )


def test_each_command_has_its_own_time(team: team_module.Team) -> None:
    """That of a rank begins when it has finished the one before."""
    team.command("share")
    team.command("share")
    assert look(team, 890, 880, 880, finished=1) == ""
    late = look(team, 910, 900, 900)
    assert late.startswith("rank 2 (process 12) did not finish command 1 within 900 s; raise step")


def test_a_command_for_an_idle_rank_begins_its_time(team: team_module.Team) -> None:
    with team._changed:
        for rank in team._ranks:
            rank.moved -= 5000
    team.command("share")
    assert look(team, 890, 880, 880) == ""


@pytest.mark.parametrize("sent", [{"kind": "done"}, {"kind": "pong", "n": "1"}])
def test_garbage_from_a_rank_is_a_failure(
    team: team_module.Team, far_ends: list[Link], sent: dict[str, Any]
) -> None:
    """Before, it ended the watch."""
    far_ends[0].send(sent)
    with pytest.raises(RankError, match=r"rank 1 \(process 11\) sent what is no message: "):
        team.wait_for("ready")


def test_a_command_that_failed_is_finished(team: team_module.Team, far_ends: list[Link]) -> None:
    """All ranks alike, so they go on; its time must not run on."""
    team.command("share")
    for end in far_ends:
        end.send({"kind": "failed", "n": 1, "error": "ValueError: 1"})
    with pytest.raises(ValueError, match="1"), team.together():
        raise ValueError(1)
    assert look(team, 2000, 1990, 1990) == ""


def test_an_idle_engine_tells_of_a_rank_that_failed(
    folder: Path, faulty: None, loaded: list[Engine]
) -> None:
    heard: queue.SimpleQueue[RankError] = queue.SimpleQueue()
    engine = load(folder, loaded, rank_failed=heard.put)
    [pid] = ranks_of(engine)
    os.kill(pid, signal.SIGKILL)
    error = heard.get(timeout=BUSY_SECONDS)
    assert f"rank 1 (process {pid}) was ended by signal 9" in str(error)
    assert engine.failure is error


@pytest.mark.parametrize("attention", ["tp", "dp"])
def test_a_rank_that_fails_alone(
    folder: Path, faulty: None, loaded: list[Engine], attention: str
) -> None:
    engine = load(folder, loaded, "raises", attention=attention)
    check_broken(
        engine,
        ranks_of(engine),
        "rank 1 failed in command 3: ValueError: a wrong number; all",
    )


@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_that_diverged_is_named(
    folder: Path, faulty: None, loaded: list[Engine], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Of two ranks nobody knows which is right: the lower one is taken for it."""
    monkeypatch.setattr(state_copier, "CHECK_COMMANDS", 8)
    engine = load(folder, loaded, f"rank {rank} diverges", pp=2)
    check_broken(engine, ranks_of(engine), "rank 3 diverged: after command ")
    assert "expected that of rank 2" in str(engine.failure)


def test_ranks_that_agree_go_on(
    folder: Path, loaded: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_copier, "CHECK_COMMANDS", 4)
    engine = load(folder, loaded, pp=2)
    [answer] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20, stop_ids=()))
    assert (len(answer.token_ids), engine.failure) == (20, None)


def test_an_error_of_all_ranks_ends_its_requests_only(
    folder: Path, faulty: None, loaded: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, loaded, "alike")
    run, turns = engine._runner._run, iter(range(100))

    def failing(key: Any) -> None:
        if not isinstance(key, int) and next(turns) == 2:
            raise KernelError("the same everywhere")
        run(key)

    monkeypatch.setattr(engine._runner, "_run", failing)
    [failed] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))
    assert (failed.finish_reason, failed.error) == ("error", "the same everywhere")
    assert engine.failure is None
    assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=3, temperature=0))) == 1


def test_an_interrupted_step_ends_the_ranks(
    folder: Path, loaded: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the middle of it: what they send next would be taken for something else."""
    engine = load(folder, loaded)

    def interrupted(key: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    assert "rank 0 was interrupted in command 1" in str(engine.failure)
    [failed] = engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    assert "interrupted" in (failed.error or "")


def test_starts_that_fail(folder: Path, faulty: None, loaded: list[Engine]) -> None:
    with pytest.raises(RankError, match="rank 1 cannot start: RankError: found another checkpoint"):
        load(folder, loaded, "digest")
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) was ended by signal 9"):
        load(folder, loaded, "dies")
    heard: queue.SimpleQueue[RankError] = queue.SimpleQueue()
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) was ended by signal 9"):
        load(folder, loaded, "dies connecting", rank_failed=heard.put)  # Gloo would wait 120 s
    assert time.monotonic() - begin < BUSY_SECONDS
    assert "was ended by signal 9" in str(heard.get(timeout=BUSY_SECONDS))
    load(folder, loaded, "slow", step_timeout=1.0)  # slower than a step may be


def test_a_rank_that_stops_while_it_starts(
    folder: Path, faulty: None, loaded: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 .* gave no sign of life .*; it was starting; all"):
        load(folder, loaded, "stops", step_timeout=6.0)
    assert time.monotonic() - begin < 6 + BUSY_SECONDS
    assert "gave no sign of life" in caplog.text


def test_ranks_that_never_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "FOLLOWER", "tests.parallel.never_ready")
    monkeypatch.setattr(fork_server, "START_SECONDS", 0.5)
    with pytest.raises(RankError, match=r"the process that starts ranks gave no answer within 0.5"):
        Engine.load(folder, device="cpu", tp=2)
    server = ForkServer._known[os.getpid(), "tests.parallel.never_ready"]
    assert server._process.wait(30) == -signal.SIGKILL


def test_a_digest_of_what_ranks_have_in_common(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    same = sampled_digest(folder)
    assert sampled_digest(copy) == same
    [file] = copy.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    for place in range(len(data) // 2, len(data), 512):  # values; the header is the same
        data[place] ^= 1
    file.write_bytes(data)
    assert sampled_digest(copy) != same


def test_ranks_name_versions_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code, libraries and GPUs, each by name."""
    same = versions("cpu")
    assert differences(versions("cpu"), same) == ""
    monkeypatch.setattr("torch.__version__", "2.0.0")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU of {device}")
    assert differences(versions("cpu"), same) == f"torch 2.0.0, expected {same['torch']}"
    assert "device GPU of cuda:1, expected CPU" in differences(versions("cuda:1"), same)
    assert differences({}, {"Triton": "3.6.0"}) == "Triton None, expected 3.6.0"
    (tmp_path / "a.py").write_text("x = 1\n")
    first = code_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert code_digest(tmp_path) == first  # computed once
    code_digest.cache_clear()
    assert code_digest(tmp_path) != first
    code_digest.cache_clear()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"tp": 3}, "tp is 3, expected a divisor of 8"),
        ({"pp": 4}, "pp is 4, expected 1 to 3, the model's layers"),
        ({"tp": 0}, "tp is 0, expected a whole number above 0"),
        ({"tp": "2"}, "tp is '2', expected a whole number"),
        ({"pp": 2, "prefix_disk": "prefixes"}, "prefix_disk is not possible with several stages"),
    ],
)
def test_layouts_that_cannot_be(
    folder: Path, choices: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if "prefix_disk" in choices:
        choices = {**choices, "prefix_disk": str(tmp_path)}
    with pytest.raises(OptionError) as error:
        Engine.load(folder, device="cpu", **choices)
    assert words in str(error.value)
