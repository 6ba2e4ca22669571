"""`make demo`: three questions to the embedded model, answered on this machine's CPU."""

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dsv4 import Engine, SamplingParams
from dsv4.cli.chat import ChatSession, Terminal

TOOLS = Path(__file__).parent.parent / "examples" / "tools.json"
QUESTIONS = (
    ("A fact", False, ("What is the capital of France?",)),
    ("Arithmetic, worked out before the answer", True, ("What is 347 + 585?",)),
    (
        "A tool call, and what its result becomes",
        True,
        ("What is the weather in Paris?", '{"sky": "sunny", "temperature": 21}'),
    ),
)
NEXT = """\
Try next:
  .venv/bin/dsv4 chat                          a conversation; /help lists what it understands
  .venv/bin/dsv4 generate -p "Where is Peru?"  one question
  .venv/bin/dsv4 inspect                       what the checkpoint holds
  .venv/bin/dsv4 doctor                        every operation of this machine, checked
  .venv/bin/dsv4 bench quality --count 10      how often it is right
  .venv/bin/dsv4 --help                        everything else
tiny knows countries, small sums, simple instructions and three tools: docs/model-card.md"""


def main() -> None:
    console = Console(highlight=False)
    begin = time.perf_counter()
    engine = Engine.load("tiny", device="cpu")
    assert engine.tokenizer is not None
    console.print(f"tiny: loaded in {time.perf_counter() - begin:.1f} s", style="dim")
    greedy = SamplingParams(max_tokens=128, temperature=0)
    for title, thinking, lines in QUESTIONS:
        session = ChatSession(engine, engine.tokenizer, engine.dialect, greedy)
        session.thinking = thinking
        if len(lines) > 1:
            session.load_tools(TOOLS)
        terminal = Terminal(session, console, input)
        console.print(f"\n{title}", style="bold")
        for line in lines:
            prompt = f"result of {session.pending[0][1]}> " if session.pending else "> "
            console.print(Text(prompt + line))
            begin = time.perf_counter()
            terminal.take(line)
            rate = session.num_tokens / (time.perf_counter() - begin)
            console.print(f"{session.num_tokens} tokens, {rate:.0f} a second", style="dim")
    console.print(Text(f"\n{NEXT}"), soft_wrap=True)


if __name__ == "__main__":
    main()
