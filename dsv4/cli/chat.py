"""`dsv4 chat`: a conversation in the terminal."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.text import Text

from dsv4.chat import Delta, Dialect, Parsed, Tokenizer, encode_prompt, new_call_id
from dsv4.chat.messages import read_tools
from dsv4.cli.options import MODEL, engine_options, load_engine
from dsv4.errors import Dsv4Error, RankError, RequestError
from dsv4.request import Output, SamplingParams

HELP = """\
/reset           begin a new conversation
/think [on|off]  reason before answering, or answer at once; alone it toggles
/fold [on|off]   show reasoning as one line, or in full; alone it toggles
/tools FILE      let the model call the tools in a JSON file; 'off' takes them away
/save FILE       write the conversation as JSON
/help            this list
/quit, /exit     leave, as does Ctrl-D
Ctrl-C stops the answer and keeps the conversation; Tab completes commands."""
COMMANDS = ("/reset", "/think", "/fold", "/tools", "/save", "/help", "/quit", "/exit")

_MAX_TOOLS_FILE_BYTES = 4 << 20


def register(app: typer.Typer) -> None:
    app.command("chat")(engine_options(chat))


def chat(
    model: str = MODEL,
    system: str | None = typer.Option(None, help="Instructions that stand before everything."),
    think: bool = typer.Option(True, "--think/--no-think", help="Reason before answering."),
    effort: str | None = typer.Option(None, help="How long to reason: low, high or max."),
    fold: bool = typer.Option(False, "--fold", help="Show reasoning as one line."),
    tools: Path | None = typer.Option(None, help="A JSON file with tools the model may call."),
    max_tokens: int = typer.Option(4096, help="Most tokens of one answer, reasoning included."),
    temperature: float = typer.Option(1.0, help="0 takes the likeliest token each time."),
    top_p: float = typer.Option(1.0),
    seed: int | None = typer.Option(None, help="The same seed gives the same answers."),
    choices: dict[str, Any] | None = None,
) -> None:
    """Talk with a model; /help lists what the prompt understands.

    Example: dsv4 chat --system "Answer in one sentence." --fold
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    engine = load_engine(model, choices or {}, Console(stderr=True))
    if engine.tokenizer is None:
        raise RequestError(
            "this checkpoint has no tokenizer.json, so there is nothing to talk with; put the"
            " model's tokenizer.json into its folder"
        )
    session = ChatSession(engine, engine.tokenizer, engine.dialect, params)
    session.system, session.thinking = system, think
    session.effort = int(effort) if effort is not None and effort.isdecimal() else effort
    engine.dialect.effort_text(session.effort)  # refuses one that the model does not have
    if tools is not None:
        session.load_tools(tools)
    _edit_lines()
    terminal = Terminal(session, Console(highlight=False), input)
    terminal.is_folded = fold
    terminal.run()


def _edit_lines() -> None:
    """History on the arrow keys and Tab completion of commands, where readline exists."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def complete(text: str, state: int) -> str | None:
    """The state-th command that starts with this text."""
    found = [name for name in COMMANDS if text.startswith("/") and name.startswith(text)]
    return found[state] if state < len(found) else None


class Streams(Protocol):
    """The part of an engine that a conversation uses; closing the iterator aborts the answer."""

    @property
    def failure(self) -> Dsv4Error | None: ...

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Output]: ...


class ChatSession:
    """A conversation: its messages and settings. Prints nothing."""

    def __init__(
        self, engine: Streams, tokenizer: Tokenizer, dialect: Dialect, params: SamplingParams
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._params = params
        self._saved_to: set[Path] = set()
        self.system: str | None = None
        self.thinking = True
        self.effort: str | int | None = None
        self.tools: list[Any] = []
        self.messages: list[dict[str, Any]] = []
        self.pending: list[tuple[str, str]] = []  # calls without a result yet: id, name
        self.num_tokens = 0  # of the answer in progress

    def reset(self) -> None:
        self.messages = []
        self.pending = []

    def ask(self, text: str) -> Iterator[Delta]:
        """Send a message and stream the answer; both are kept even if the answer is interrupted."""
        return self._answer({"role": "user", "content": text})

    def give_result(self, text: str) -> Iterator[Delta] | None:
        """Answer the first pending call; streams the continuation when no call is left."""
        call_id, _ = self.pending[0]
        result = {"role": "tool", "tool_call_id": call_id, "content": text}
        if len(self.pending) > 1:
            self.messages.append(result)
            self.pending.pop(0)
            return None
        return self._answer(result)

    def load_tools(self, path: Path) -> None:
        """Tools as in chat completions: a list, or an object with a `tools` list."""
        try:
            data = path.read_bytes()[: _MAX_TOOLS_FILE_BYTES + 1]
            if len(data) > _MAX_TOOLS_FILE_BYTES:
                raise RequestError(f"{path}: larger than {_MAX_TOOLS_FILE_BYTES} bytes")
            tools = json.loads(data)
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"{path}: cannot be read as JSON: {error}") from error
        tools = tools.get("tools") if isinstance(tools, dict) else tools
        read_tools(tools, "tools", as_received=False)
        self.tools = list(tools or [])

    def save(self, path: Path) -> None:
        if path.exists() and path.resolve() not in self._saved_to:
            raise RequestError(f"{path} exists; choose another name")
        content = {"messages": self._all_messages(), "tools": self.tools}
        try:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise RequestError(f"{path}: cannot be written: {error}") from error
        self._saved_to.add(path.resolve())

    def _all_messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _answer(self, message: dict[str, Any]) -> Iterator[Delta]:
        before, pending = len(self.messages), self.pending
        self.messages.append(message)
        self.pending = []
        self.num_tokens = 0
        reason: str | None = None
        parser = None
        stream: Any = None
        try:
            prompt = encode_prompt(
                self._all_messages(),
                dialect=self._dialect,
                tools=self.tools,
                mode="thinking" if self.thinking else "chat",
                effort=self.effort,
            )
            parser = prompt.parser(self._tokenizer)
            stream = self._engine.stream(prompt.ids(self._tokenizer), self._params)
            for output in stream:
                self.num_tokens += len(output.token_ids)
                yield from parser.push_tokens(output.token_ids)
                reason = output.finish_reason
                if output.error:
                    kind = Dsv4Error if self._engine.failure is None else RankError
                    raise kind(f"the answer broke off: {output.error}")
            yield from parser.finish("stop" if reason == "stop" else "length")
        except Dsv4Error:
            # Otherwise every later turn would fail with the same error.
            del self.messages[before:]
            self.pending = pending
            raise
        finally:
            if hasattr(stream, "close"):
                stream.close()
            if parser is not None and len(self.messages) > before:
                parser.finish("length")  # no effect if the answer is complete
                self._keep(parser.result, is_whole=reason == "stop")

    def _keep(self, answer: Parsed, *, is_whole: bool) -> None:
        """Add the answer to the conversation; only its text if it was interrupted."""
        calls = answer.tool_calls if is_whole else ()
        if not (answer.reasoning or answer.content or calls):
            return
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            self.pending = [(new_call_id(at), call.name) for at, call in enumerate(calls)]
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for (call_id, _), call in zip(self.pending, calls, strict=True)
            ]
        self.messages.append(message)


class Terminal:
    """Reads lines, prints answers. `read` returns one line and raises EOFError at the end."""

    def __init__(self, session: ChatSession, console: Console, read: Callable[[str], str]) -> None:
        self._session = session
        self._console = console
        self._read = read
        self._is_line_open = False
        self._is_left = False
        self.is_folded = False

    def run(self) -> None:
        self._note("/help lists the commands; /quit or Ctrl-D leaves")
        while not self._is_left:
            pending = self._session.pending
            try:
                line = self._read(f"result of {pending[0][1]}> " if pending else "> ")
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                self._note("Ctrl-D leaves")
                continue
            try:
                self.take(line)
            except RankError:
                raise  # no later turn could be answered
            except Dsv4Error as error:
                self._note(f"error: {error}", style="red")

    def take(self, line: str) -> None:
        """Process a line as if typed: a command, a tool result, or a message."""
        if line.startswith("/"):
            self._command(line)
        elif self._session.pending:
            self._show(self._session.give_result(line))
        elif line.strip():
            self._show(self._session.ask(line))

    def _command(self, line: str) -> None:
        name, _, value = line.strip().partition(" ")
        value = value.strip()
        session = self._session
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            session.reset()
            self._note("a new conversation")
        elif name in ("/quit", "/exit"):
            self._is_left = True
        elif name == "/think":
            session.thinking = self._switch(name, value, session.thinking)
            self._note(f"thinking is {'on' if session.thinking else 'off'}")
        elif name == "/fold":
            self.is_folded = self._switch(name, value, self.is_folded)
            self._note(f"folding is {'on' if self.is_folded else 'off'}")
        elif name == "/tools" and value == "off":
            session.tools = []
            self._note("no tools")
        elif name == "/tools" and value:
            session.load_tools(Path(value))
            self._note(f"{len(session.tools)} tools")
        elif name == "/save" and value:
            session.save(Path(value))
            self._note(f"saved to {value}")
        elif name in ("/tools", "/save"):
            raise RequestError(f"{name} needs the name of a file")
        else:
            raise RequestError(
                f"{name} is no command; /help lists them, and a space before it sends it as text"
            )

    def _switch(self, name: str, value: str, now: bool) -> bool:
        if value not in ("on", "off", ""):
            raise RequestError(f"found {name} {value!r}, expected {name} on or {name} off")
        return value == "on" if value else not now

    def _show(self, deltas: Iterator[Delta] | None) -> None:
        """Print an answer as it streams. Ctrl-C aborts it."""
        if deltas is None:
            return
        kind = ""
        try:
            with contextlib.ExitStack() as stack:
                status: Any = None
                if self.is_folded and self._session.thinking:
                    status = stack.enter_context(self._console.status("thinking"))
                for delta in deltas:
                    if delta.kind == "reasoning" and self.is_folded:
                        kind = delta.kind
                        continue
                    if status is not None:
                        status.stop()
                    self._change(kind, delta)
                    kind = delta.kind
            if kind == "reasoning" and self.is_folded:
                self._note_thought()
        except KeyboardInterrupt:
            self._end_line()
            self._note("stopped")
        finally:
            deltas.close()  # type: ignore[attr-defined]
            self._end_line()

    def _change(self, before: str, delta: Delta) -> None:
        """Print one piece, with a blank line between the parts of an answer."""
        if before != delta.kind:
            if before == "reasoning" and self.is_folded:
                self._note_thought()
            elif before:
                self._end_line()
        if delta.kind == "call":
            self._end_line()
            self._put(f"calls {delta.text} ", "cyan")
        else:
            styles = {"reasoning": "dim", "arguments": "cyan"}
            self._put(delta.text, styles.get(delta.kind, ""))

    def _put(self, text: str, style: str) -> None:
        self._console.print(Text(printable(text), style), end="", soft_wrap=True)
        self._is_line_open = not text.endswith("\n")

    def _note_thought(self) -> None:
        self._note(f"thought for {self._session.num_tokens} tokens")

    def _end_line(self) -> None:
        if self._is_line_open:
            self._console.print()
        self._is_line_open = False

    def _note(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(printable(text), style))


def printable(text: str) -> str:
    """Show control characters as symbols, so that a model cannot control the terminal."""
    return "".join(
        char if char in "\n\t" or ord(char) > 0x9F or 0x20 <= ord(char) < 0x7F
        else chr(0x2400 + ord(char)) if ord(char) < 0x20
        else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )  # fmt: skip
