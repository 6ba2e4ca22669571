"""What people expect of any command: a version, pipes, help that fits, completion, progress."""

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from rich.console import Console

import dsv4
from dsv4.checkpoint.rank_slices import held_parts
from dsv4.cli import app, progress
from dsv4.cli.chat import COMMANDS, HELP, Terminal, complete
from dsv4.cli.generate import _prompt_text
from dsv4.cli.options import complete_model
from dsv4.cli.progress import ProgressBar, StageStatus, parts_text, progress_line
from dsv4.cli.serve import _Screen, ready_lines
from dsv4.config import EngineConfig
from dsv4.errors import CheckpointError, OptionError, RequestError
from dsv4.runner.load import prepare
from dsv4.tools.bench_ops import num_results
from dsv4.util.models import model_folder
from dsv4.util.sizes import size_text, time_text
from tests.cli.test_cli import Cli, cli  # noqa: F401  # the fixture
from tests.models import write_fast_model

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsv4", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=60, env=env, cwd=ROOT
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fast_model(tmp_path_factory.mktemp("model")))


def commands(group: Any, name: str = "") -> list[tuple[str, Any]]:
    """Every command with its full name."""
    found = []
    for key, item in group.commands.items():
        full = f"{name} {key}".strip()
        found += commands(item, full) if hasattr(item, "commands") else [(full, item)]
    return found


ALL = commands(typer.main.get_command(app))


def test_version_by_both_doors() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"dsv4 {dsv4.__version__}\n")


@pytest.mark.parametrize("name", [name for name, _ in ALL])
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        app([*name.split(), "--help"], prog_name="dsv4")
    assert end.value.code == 0
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        app([*name.split(), "--help"], prog_name="dsv4")
    text = out.getvalue()
    assert f"Usage: dsv4 {name}" in text
    assert "<bool>" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_list_of_commands_cuts_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ([], ["bench"]):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit):
            app([*group, "--help"], prog_name="dsv4")
        listed = out.getvalue().split("Commands:")[1]
        assert "..." not in listed


def test_the_embedded_model_is_no_shape(cli: Cli) -> None:  # noqa: F811
    result = cli("bench", "decode", "--shape", "tiny", "--device", "cpu")
    assert result.code == 2
    assert "tiny is a model, not a shape" in result.err


def test_a_terminal_without_boxes_shows_the_rest() -> None:
    """Bars of the plan, or an answer in Chinese: no traceback in the middle of a table."""
    result = run("plan", "tiny", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "| left for state" in result.stdout
    assert "times are predicted" in result.stdout


def pipe(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def test_prompts_come_through_a_pipe(
    cli: Cli,  # noqa: F811
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--max-tokens", "2", "--temperature", "0", "--raw", "--max-context", "200")
    expected = cli("generate", model, *options, "-p", "abc")
    assert expected.code == 0
    for way in ((), ("-p", "-"), ("--prompt-file", "-")):
        monkeypatch.setattr(sys, "stdin", pipe("abc"))
        assert cli("generate", model, *options, *way).out == expected.out
    monkeypatch.setattr(sys, "stdin", pipe("abd"))
    assert cli("generate", model, *options, "-p", "abc").out == expected.out


def test_a_terminal_without_a_prompt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Keyboard())
    with pytest.raises(OptionError, match="through a pipe"):
        _prompt_text(None, None)
    with pytest.raises(OptionError, match="one of them"):
        _prompt_text("a", Path("b"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(RequestError, match="cannot read the prompt"):
        _prompt_text("-", None)
    monkeypatch.setattr(sys, "stdin", pipe(""))
    with pytest.raises(RequestError, match="the prompt is empty"):
        _prompt_text(None, None)


def test_a_name_on_the_hub_gets_a_hint() -> None:
    name = "deepseek-ai/DeepSeek-V4-Flash"
    with pytest.raises(CheckpointError, match=f"hf download {name} --local-dir DeepSeek-V4-Flash"):
        model_folder(name)
    for path in ("./a/b", "/a/b", "a/b/c", "nothing"):
        with pytest.raises(CheckpointError, match="neither a folder nor an embedded model"):
            model_folder(path)


def test_bash_completes_commands_and_models() -> None:
    words = {"_DSV4_COMPLETE": "complete_bash", "COMP_WORDS": "dsv4 in", "COMP_CWORD": "1"}
    assert run(**words).stdout.split() == ["inspect"]  # type: ignore[arg-type]
    assert "tiny" in complete_model("ti")
    assert complete_model(f"{ROOT}/dsv4/mod") == [f"{ROOT}/dsv4/model/", f"{ROOT}/dsv4/models/"]
    assert complete_model("/nowhere/x") == []


@pytest.mark.parametrize("end", ["/quit", "/exit"])
def test_chat_is_left_and_switched(end: str) -> None:
    lines = iter(["/think", "/think", "/fold", "/think maybe", end, "never read"])
    out = io.StringIO()
    session = SimpleNamespace(thinking=True, pending=[])
    Terminal(cast(Any, session), Console(file=out), lambda _: next(lines)).run()
    notes = re.findall(r"(thinking|folding) is (on|off)", out.getvalue())
    assert notes == [("thinking", "off"), ("thinking", "on"), ("folding", "on")]
    assert "expected /think on or /think off" in out.getvalue()
    assert next(lines) == "never read"


def test_chat_refuses_an_effort_before_the_first_question(cli: Cli) -> None:  # noqa: F811
    result = cli("chat", "--effort", "furious")
    assert (result.code, result.out) == (2, "")
    assert "'furious', expected one of minimal, low" in result.message


def test_tab_completes_the_commands_of_chat() -> None:
    assert complete("/t", 0) == "/think"
    assert complete("/t", 1) == "/tools"
    assert complete("/t", 2) is None
    assert complete("t", 0) is None
    for name in COMMANDS:
        assert name in HELP


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (31_000, "31.00 kB"), (15e6, "15.00 MB"), (159.6e9, "159.60 GB")],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    out = io.StringIO()
    console = Console(file=out, width=80)
    with ProgressBar(console, "loading weights") as work, StageStatus(console) as stage:
        work(1000, 4000)
        work(4000, 4000)  # the end says itself
        stage("next [part]")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"loading weights: 25 % of 4.00 kB, \S+ \w+/s, \d+ s left", lines[0])
    assert lines[1] == "next [part]"
    line = progress_line("scoring", "tokens", 50, 200, 10.0)
    assert line == "scoring: 25 % of 200 tokens, 5 tokens/s, 30 s left"
    assert progress_line("x", "bytes", 0, 10, 0.0) == "x: 0 % of 10 B"
    assert progress_line("x", "bytes", 30, 6_680_000, 10.0) == "x: 0 % of 6.68 MB"  # not 3 B/s
    assert progress_line("x", "bytes", 70_000, 6_680_000, 1.0).endswith(
        ", 70.00 kB/s, 1:34 min left"
    )


def test_progress_in_a_terminal_leaves_nothing() -> None:
    out = io.StringIO()
    with ProgressBar(Console(file=out, width=80, force_terminal=True), "loading") as work:
        work(1, 2)
    assert "loading" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[2K")  # the line is cleared


def test_times() -> None:
    assert [time_text(s) for s in (0.4, 59, 61, 3600, 5400)] == [
        "0 s", "59 s", "1:01 min", "1:00 h", "1:30 h",
    ]  # fmt: skip


def test_bench_serve_says_where_it_is(
    cli: Cli,  # noqa: F811
    model: str,
) -> None:
    loads = [f"rate=0,requests={number},in=3,out=1" for number in (1, 2)]
    options = [part for load in loads for part in ("--load", load)]
    result = cli("bench", "serve", model, "--max-context", "64", "--device", "cpu", *options)
    assert result.code == 0, result.err
    said = re.findall(r"^all at once, (\d) requests.* \((.*)\)$", result.err, re.M)
    assert [count for count, _ in said] == ["1", "2"]
    assert said[0][1] == "0 of 2 done"
    assert re.fullmatch(r"1 of 2 done, \S+( s each)?, \d+ s left", said[1][1])


def test_the_number_of_timed_ops_is_known_beforehand() -> None:
    tokens = [1, 8, 8192]
    names = ("csa inputs", "wq_b", "wo_a", "wo_b", "shared gate/up", "router", "embed")
    assert num_results(["flash"], tokens, "head") == 2  # of at most 128 tokens
    assert num_results(["flash"], tokens, "experts mx") == 2 * len(tokens)  # with, without shared
    assert num_results(["flash", "pro"], tokens) == 2 * (len(names) * 3 + 2 + 2 * 2 * 3)


def test_warm_up_shows_time_left_in_serve(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with _Screen("tiny") as screen:
        screen.show({"kind": "plan", "text": "14.98 MB of weights (official layout) on cpu"})
        screen.show({"kind": "progress", "stage": "load", "done": 4, "total": 4})
        for done in (0, 1, 4):
            screen.show({"kind": "progress", "stage": "warm-up", "done": done, "total": 4})
        screen.show({"kind": "ready", "address": "http://127.0.0.1:1"})
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "weights loaded; warming up"
    assert lines[2] == "warming up: 0 % of 4 steps, 0 steps/s"
    assert re.fullmatch(r"warming up: 25 % of 4 steps, \S+ steps/s, \d+ s left", lines[3])
    assert lines[4] == "ready: http://127.0.0.1:1"
    assert lines[5] == "  model  tiny; 14.98 MB of weights (official layout) on cpu"


def test_the_plan_names_the_layout(model: str) -> None:
    prepared = prepare(model, EngineConfig.make(device="cpu", max_context=64))
    assert f"of weights ({prepared.checkpoint.layout} layout) on cpu" in str(prepared)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 3)])
def test_the_plan_names_the_fullest_rank(tp: int, pp: int) -> None:
    """Any rank of any stage: the last stage has the head, and other kinds of layers."""
    choices = EngineConfig.make(device="cpu", max_context=4096, max_sequences=2, tp=tp, pp=pp)
    prepared = prepare("tiny", choices)
    config, checkpoint = prepared.config, prepared.checkpoint
    ranks = [replace(prepared.layout, rank=rank) for rank in range(tp * pp)]
    nbytes = {name: source.nbytes for name, source in checkpoint.sources.items()}
    weights = [sum(held_parts(config, nbytes, rank).values()) for rank in ranks]
    geometry = prepared.settings.geometry(config)
    states = [
        replace(geometry, layers=rank.layers(config)).state_bytes(4096, 2, None) for rank in ranks
    ]
    assert f"(tp {tp}, pp {pp}) on cpu, {size_text(max(weights))} on the fullest; " in str(prepared)
    assert f"in {size_text(max(states))} of state on the fullest (" in str(prepared)


def test_parts_have_a_rate_and_a_time_left() -> None:
    assert parts_text(0, 12, 0.0) == "0 of 12 done"
    assert parts_text(3, 12, 60.0) == "3 of 12 done, 20 s each, 3:00 min left"
    assert parts_text(40, 90, 16.0) == "40 of 90 done, 2.5/s, 20 s left"


def test_known_bytes_pick_their_unit() -> None:
    """No file prints bytes divided by a fixed unit: that is how "0.0 GB" comes about."""
    fixed = re.compile(r"\{[^{}]*/ (1e9|1e6|2\*\*30|2\*\*20):\.\d+f\} [GM]i?B\b|%\.\df [GM]i?B\b")
    found = [str(path) for path in (ROOT / "dsv4").rglob("*.py") if fixed.search(path.read_text())]
    assert not found


def test_the_ready_lines_can_be_pasted() -> None:
    plan = "14.98 MB of weights on cpu; 8 sequences in 4.00 MB of state; activations a16: default"
    lines = ready_lines("http://127.0.0.1:8000", "tiny", plan)
    assert lines[0] == "ready: http://127.0.0.1:8000"
    assert lines[1].endswith("tiny; 14.98 MB of weights on cpu; 8 sequences in 4.00 MB of state")
    assert any("curl -s http://127.0.0.1:8000/v1/chat/completions" in line for line in lines)


PREDICT = ("bench", "ops", "--predict", "b200", "--shape", "flash", "--tokens", "1,8192")


@pytest.mark.parametrize("command", [("inspect",), ("plan", "flash"), ("check",), PREDICT])
def test_tables_fit_80_columns(
    cli: Cli,  # noqa: F811
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli(*command).out
    assert "…" not in out
    assert max(len(line) for line in out.splitlines() if "TFLOP/s a16" not in line) <= 80
