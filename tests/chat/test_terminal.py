"""`dsv4 chat` with an engine that says what the test wants."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsv4.chat import V4_OFFICIAL, encode_prompt
from dsv4.chat import texts as fixed
from dsv4.chat.lexer import split_markers
from dsv4.cli.chat import ChatSession, Terminal, printable
from dsv4.errors import RankError, RequestError
from dsv4.request import Output, SamplingParams
from tests.chat.fuzz import tiny_tokenizer

TINY = tiny_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
CALL = (
    'I look.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


class FakeEngine:
    """Answers with the next of `answers`: a text, or an exception in the middle of one."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.num_closed = 0
        self.failure: RankError | None = None

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Output]:
        self.prompts.append(TINY.decode(prompt))
        answer = self.answers.pop(0)
        text, error = answer if isinstance(answer, tuple) else (answer, None)
        try:
            markers = (fixed.THINK_CLOSE, fixed.DSML, fixed.EOS)
            for piece, is_marker in split_markers(text, markers):
                ids = [TINY.marker_id(piece)] if is_marker else TINY.encode(piece)
                for token_id in ids:
                    yield Output("r", (token_id,), "")
            if isinstance(error, str):
                yield Output("r", (), "", "error", error=error)
            elif error is not None:
                raise error
            yield Output("r", (TINY.special.eos,), "", "stop")
        finally:
            self.num_closed += 1


def talk(engine: FakeEngine, *lines: Any) -> tuple[ChatSession, Terminal, str]:
    session = ChatSession(engine, TINY, V4_OFFICIAL, SamplingParams())
    session.effort = "low"
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=True, highlight=False)
    terminal = Terminal(session, console, reader(*lines))
    terminal.run()
    return session, terminal, screen.getvalue()


def reader(*lines: Any) -> Callable[[str], str]:
    """Gives the lines one by one, then ends as Ctrl-D does; an exception is raised."""
    waiting = list(lines)

    def read(prompt: str) -> str:
        line = waiting.pop(0) if waiting else EOFError()
        if isinstance(line, BaseException):
            raise line
        return str(line)

    return read


def test_an_answer_is_shown_with_its_reasoning_dimmed() -> None:
    engine = FakeEngine("Easy.</think>Paris.")
    session, _, screen = talk(engine, "Capital of France?")
    assert "\x1b[2mE\x1b[0m" in screen
    assert "Paris." in screen.replace("\x1b[0m", "")
    assert session.messages == [
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris.", "reasoning_content": "Easy."},
    ]
    assert engine.num_closed == 1
    expected = encode_prompt(session.messages[:1], dialect=V4_OFFICIAL, effort="low").text
    assert engine.prompts == [expected]


def test_a_dead_rank_ends_it() -> None:
    engine = FakeEngine(("Easy.", "rank 1 was ended"), "no later answer")
    engine.failure = RankError("rank 1 was ended")
    with pytest.raises(RankError, match="the answer broke off: rank 1 was ended") as error:
        talk(engine, "Capital of France?", "again")
    assert error.value.exit_code == 70


def test_folded_reasoning_is_one_line() -> None:
    engine = FakeEngine("Secret plan.</think>Done.", "Only thoughts")
    _, terminal, screen = talk(engine, "/fold on", "go", "again", "/fold off")
    assert "Secret" not in screen
    assert "Only" not in screen
    assert "thought for 14 tokens" in screen
    assert "thought for 14 tokens" in screen.replace("thought for 14 tokens", "", 1)
    assert terminal.is_folded is False


def test_the_conversation_goes_on() -> None:
    engine = FakeEngine("r1</think>one", "r2</think>two")
    talk(engine, "first", "second")
    assert engine.prompts[1].endswith(
        "first<｜Assistant｜></think>one<｜end▁of▁sentence｜><｜User｜>second<｜Assistant｜><think>"
    )


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation() -> None:
    engine = FakeEngine(("I think so.</think>It is a lo", KeyboardInterrupt()), "x</think>ok")
    session, _, screen = talk(engine, "tell", "next")
    assert "stopped" in screen
    assert engine.num_closed == 2
    assert session.messages[1]["content"] == "It is a lo"
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert "It is a lo<｜end▁of▁sentence｜>" in engine.prompts[1]


def test_ctrl_c_before_the_first_token_and_at_the_prompt() -> None:
    engine = FakeEngine(("", KeyboardInterrupt()), "y</think>ok")
    session, _, screen = talk(engine, "one", KeyboardInterrupt(), "two")
    assert "Ctrl-D leaves" in screen
    assert engine.prompts[1].endswith("one\n\ntwo<｜Assistant｜><think>")
    assert session.messages[-1]["content"] == "ok"


def test_think_off_and_reset() -> None:
    engine = FakeEngine("Hi.", "Ho.")
    session, _, _ = talk(engine, "/think off", "hello", "/reset", "again")
    assert engine.prompts[0].endswith("hello<｜Assistant｜></think>")
    assert engine.prompts[1] == engine.prompts[0].replace("hello", "again")
    assert session.messages[1] == {"role": "assistant", "content": "Ho."}


def test_tools_ask_for_their_results(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps({"tools": TOOLS}))
    engine = FakeEngine(CALL, "fine</think>Both done.")
    session, _, screen = talk(engine, f"/tools {file}", "go", "first", "second")
    assert "calls get" in screen
    assert (
        "<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>"
        in (engine.prompts[1])
    )
    ids = [call["id"] for call in session.messages[1]["tool_calls"]]
    assert ids[0].startswith("call_00_")
    assert ids[1].startswith("call_01_")
    assert session.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "x"}'
    assert session.messages[-1]["content"] == "Both done."
    assert session.pending == []


def test_a_call_cut_short_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    engine = FakeEngine((CALL[:-30], KeyboardInterrupt()), "</think>ok")
    session, _, _ = talk(engine, f"/tools {file}", "go", "go on")
    assert "tool_calls" not in session.messages[1]
    assert session.messages[-1]["content"] == "ok"


def test_save(tmp_path: Path) -> None:
    file, other = tmp_path / "chat.json", tmp_path / "mine.txt"
    other.write_text("precious")
    engine = FakeEngine("r</think>日本 \ufffd", "r</think>b")
    session, _, screen = talk(
        engine, "one", f"/save {file}", "two", f"/save {file}", f"/save {other}", "/save /no/where"
    )
    assert json.loads(file.read_text("utf-8"))["messages"] == session.messages
    assert other.read_text() == "precious"
    assert "exists; choose another name" in screen
    assert "/no/where: cannot be written" in screen


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/dance", "/dance is no command"),
        ("/think maybe", "expected /think on or /think off"),
        ("/fold now", "expected /fold on"),
        ("/save", "/save needs the name of a file"),
        ("/tools", "/tools needs the name of a file"),
        ("/tools /no/file.json", "cannot be read as JSON"),
        ("/help", "Ctrl-C stops the answer"),
        ("/tools off", "no tools"),
    ],
)
def test_commands_answer(line: str, words: str) -> None:
    engine = FakeEngine()
    session, _, screen = talk(engine, line, "", "   ")
    assert words in screen
    assert session.messages == []
    assert engine.prompts == []


@pytest.mark.parametrize("content", ["{", "[3]", '{"tools": 3}', "[" * 5000, '[{"function": {}}]'])
def test_bad_tools_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(content)
    session, _, screen = talk(FakeEngine(), f"/tools {file}")
    assert "error:" in screen
    assert session.tools == []


@pytest.mark.parametrize("failure", ["out of pages", RequestError("the prompt is too long")])
def test_a_failed_answer_leaves_the_conversation_as_it_was(failure: Any) -> None:
    engine = FakeEngine(("half</think>an", failure), "</think>ok")
    session, _, screen = talk(engine, "long", "short")
    assert "error:" in screen
    assert str(failure) in screen
    assert [message["content"] for message in session.messages] == ["short", "ok"]


def test_a_failed_result_can_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    engine = FakeEngine(CALL, ("", "out of pages"), "</think>ok")
    session, _, _ = talk(engine, f"/tools {file}", "go", "first", "second", "second")
    assert [message["role"] for message in session.messages] == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip


def test_the_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\x9b\x7f\tb\n日") == "a␛[2J␇\ufffd\ufffd\tb\n日"
    _, _, screen = talk(FakeEngine("</think>\x1b]0;owned\x07[red]x"), "go")
    assert "\x1b]0" not in screen
    assert "[red]x" in screen.replace("\x1b[0m", "")
