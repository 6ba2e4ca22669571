"""Accuracy by skill on held-out prompts, with greedy decoding through the engine.

Prompts and answers come from `quality.jsonl` beside the weights; retrieval documents are generated
from a seed. An answer is correct if the text after the thinking block is the expected one, or if
the parsed call names the expected tool with the expected arguments.

`variants` deliberately breaks a part of the model, to show that the answers depend on it.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dsv4.chat import Prompt, encode_prompt
from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.request import SamplingParams
from dsv4.tools.quality.text import Fact, retrieval_prompts, story, updates_prompt
from dsv4.util.models import model_folder

RETRIEVAL_LENGTHS = (2000, 8000, 16000)
MOST_TOKENS = 192  # per answer
MOST_SHOWN = 5  # wrong answers
DOCUMENT_QUESTIONS = 10
UPDATES_LENGTH = 2000
MOST_UPDATES = 50  # each of these questions needs its own document


@dataclass(frozen=True)
class Item:
    """A held-out prompt: either `answer` or `call` (tool name and arguments) is expected."""

    skill: str
    messages: list[dict[str, Any]]
    mode: str = "chat"
    tools: tuple[dict[str, Any], ...] = ()
    answer: str | None = None
    call: tuple[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Score:
    skill: str
    num_right: int
    num_asked: int
    wrong: tuple[str, ...] = ()  # the first few wrong answers, for inspection

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked if self.num_asked else math.nan

    def __add__(self, other: "Score") -> "Score":
        right, asked = self.num_right + other.num_right, self.num_asked + other.num_asked
        return Score(self.skill, right, asked, (*self.wrong, *other.wrong)[:MOST_SHOWN])

    def __str__(self) -> str:
        return f"{self.skill}: {100 * self.accuracy:.1f} % of {self.num_asked}"


def read_items(model: str | Path) -> dict[str, list[Item]]:
    """The held-out prompts that ship with a model, by skill."""
    path = model_folder(str(model)) / "quality.jsonl"
    if not path.is_file():
        raise OptionError(f"{path} is missing; only the embedded model comes with held-out prompts")
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    tools = json.loads(first)["tools"]
    items: dict[str, list[Item]] = {}
    for line in lines:
        entry = json.loads(line)
        call = entry.get("call")
        item = Item(
            entry["skill"],
            entry["messages"],
            entry["mode"],
            tuple(tools[number] for number in entry.get("tools", ())),
            entry.get("answer"),
            (call[0], call[1]) if call else None,
        )
        items.setdefault(item.skill, []).append(item)
    return items


def retrieval_items(engine: Engine, num_tokens: int, number: int) -> list[Item]:
    """Questions about facts stated somewhere in one document of about `num_tokens`."""
    seed = num_tokens * 1000 + number
    made = retrieval_prompts(seed, num_tokens, _counter(engine), DOCUMENT_QUESTIONS)
    return [_asked(f"retrieval {num_tokens}", question, fact) for question, fact in made]


def updates_items(engine: Engine, num_tokens: int, num_items: int) -> list[Item]:
    """Questions about a word that changed many times, each with its own document."""
    count = _counter(engine)
    made = [updates_prompt(num_tokens * 1000 + n, num_tokens, count) for n in range(num_items)]
    return [_asked(f"updates {num_tokens}", question, fact) for question, fact in made]


def _asked(skill: str, question: str, fact: Fact) -> Item:
    return Item(skill, [{"role": "user", "content": question}], answer=fact.statement)


def _counter(engine: Engine) -> Callable[[str], int]:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise OptionError("this model has no tokenizer, so no text can be made for it")

    @lru_cache(maxsize=100_000)
    def length(text: str) -> int:
        return len(tokenizer.encode(text))

    return length


def ask_about_documents(engine: Engine, num_tokens: int, count: int) -> Score:
    """`count` questions. A document's first one runs alone, so the others hit the cache."""
    total = Score(f"retrieval {num_tokens}", 0, 0)
    number = 0
    while total.num_asked < count:
        first, *others = retrieval_items(engine, num_tokens, number)[: count - total.num_asked]
        total = total + ask(engine, [first]) + ask(engine, others)
        number += 1
    return total


def encode_item(engine: Engine, item: Item) -> Prompt:
    return encode_prompt(
        item.messages, dialect=engine.dialect, tools=list(item.tools) or None, mode=item.mode
    )


def ask(engine: Engine, items: Sequence[Item], skill: str | None = None) -> Score:
    """Greedy answers to all items, computed as one batch."""
    assert engine.tokenizer is not None
    prompts = [encode_item(engine, item) for item in items]
    params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0)
    answers = engine.generate([prompt.ids(engine.tokenizer) for prompt in prompts], params)
    right = 0
    wrong: list[str] = []
    for item, prompt, answer in zip(items, prompts, answers, strict=True):
        parser = prompt.parser(engine.tokenizer)
        parser.push_tokens(answer.token_ids)
        parser.finish("stop" if answer.finish_reason == "stop" else "length")
        parsed = parser.result
        calls = [(call.name, _arguments(call.arguments)) for call in parsed.tool_calls]
        if is_right(item, parsed.content, calls):
            right += 1
        elif len(wrong) < MOST_SHOWN:
            wrong.append(f"wanted {item.call or item.answer!r}, got {parsed.content!r} {calls}")
    name = skill or (items[0].skill if items else "")
    return Score(name, right, len(items), tuple(wrong))


def is_right(item: Item, content: str, calls: Sequence[tuple[str, Any]]) -> bool:
    if item.call is not None:
        return list(calls) == [item.call]
    return not calls and content.strip() == item.answer


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def measure(
    engine: Engine,
    items: dict[str, list[Item]],
    count: int = 200,
    lengths: Sequence[int] = RETRIEVAL_LENGTHS,
    report: Callable[[Score], None] | None = None,
) -> list[Score]:
    """Accuracy of every skill on up to `count` prompts each.

    `lengths`: of the documents to search; changed words are asked for at one of them only.
    """
    scores = []
    for skill, asked in items.items():
        scores.append(ask(engine, asked[:count], skill))
        if report:
            report(scores[-1])
    for length in lengths:
        scores.append(ask_about_documents(engine, length, count))
        if report:
            report(scores[-1])
    if UPDATES_LENGTH in lengths:
        changed = updates_items(engine, UPDATES_LENGTH, min(count, MOST_UPDATES))
        scores.append(ask(engine, changed))
        if report:
            report(scores[-1])
    return scores


def num_scores(items: dict[str, list[Item]], lengths: Sequence[int]) -> int:
    """How many scores `measure` reports."""
    return len(items) + len(lengths) + (UPDATES_LENGTH in lengths)


def perplexity(engine: Engine, num_stories: int = 20) -> float:
    """Token-level perplexity on stories the model was not trained on."""
    assert engine.tokenizer is not None
    total, count = 0.0, 0
    for number in range(num_stories):
        text = story(random.Random(f"held out {number}"), 12)
        ids = [engine.tokenizer.special.bos, *engine.tokenizer.encode(text)]
        logits = torch.cat(list(engine.score(ids)))
        following = torch.tensor(ids[1:], device=logits.device)[:, None]
        chosen = logits[:-1].log_softmax(-1).gather(1, following)
        total -= float(chosen.sum())
        count += len(ids) - 1
    return math.exp(total / count)
