"""The embedded model behind the server: nothing is scripted here."""

import resource
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.server.support import ASK, Server


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: OpenAI, **options: Any) -> Any:
    options.setdefault("max_tokens", 12)
    return client.chat.completions.create(model="tiny", messages=ASK, **options)


def test_it_is_ready_in_time() -> None:
    """Counted in CPU seconds, which other work on the machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    server = Server(fake=False).wait(120)
    assert server.stop() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "plan: " in server.final_log
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def test_a_seed_makes_it_repeatable_whole_or_streamed(client: OpenAI) -> None:
    whole = ask(client, seed=3, reasoning_effort="none").choices[0]
    again = ask(client, seed=3, reasoning_effort="none", n=2).choices[0]
    stream = ask(client, seed=3, reasoning_effort="none", stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.message.content == again.message.content == text


def test_choices_use_neighbouring_seeds(client: OpenAI) -> None:
    both = ask(client, seed=3, n=2, reasoning_effort="none").choices
    second = ask(client, seed=4, reasoning_effort="none").choices[0]
    assert both[1].message.content == second.message.content


def test_usage_counts(client: OpenAI) -> None:
    done = ask(client, temperature=0)
    assert 0 < done.usage.completion_tokens <= 12
    assert done.choices[0].finish_reason in ("stop", "length")
