"""The anthropic package against a running server with scripted answers."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from dsv4.chat import Tokenizer
from dsv4.util.models import model_folder
from tests.server.support import ASK, PATIENCE_S, Server
from tests.server.test_openai import OSLO, ROME, calls_text

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}

PICTURE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        ],
    }
]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def ask(client: Anthropic, say: str, **options: Any) -> Any:
    options.setdefault("max_tokens", 300)
    messages: Any = [{"role": "user", "content": f"SAY {say}"}]
    return client.messages.create(model="tiny", messages=messages, **options)


def test_thinking_and_text(client: Anthropic) -> None:
    message = ask(client, "Hm.</think>Four.")
    thinking, text = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "Four.")
    assert message.stop_reason == "end_turn"
    assert message.id.startswith("msg_")
    usage = message.usage
    assert usage.cache_read_input_tokens == 4
    assert usage.input_tokens > 0
    assert usage.output_tokens > 2


def test_thinking_off(client: Anthropic) -> None:
    [text] = ask(client, "Four.", thinking={"type": "disabled"}).content
    assert text.text == "Four."


def test_the_stream_helper(client: Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "SAY Hm.</think>An answer."}]
    with client.messages.stream(model="tiny", messages=messages, max_tokens=300) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Hm."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "An answer."
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.output_tokens > 2


def test_tools_whole_and_streamed(client: Anthropic) -> None:
    say = f"Hm.</think>{calls_text(ROME, OSLO)}"
    message = ask(client, say, tools=[WEATHER])
    _, rome, oslo = message.content
    assert (rome.name, rome.input) == ("get_weather", {"city": "Rome"})
    assert oslo.input == {"city": "Oslo"}
    assert message.stop_reason == "tool_use"
    messages: Any = [{"role": "user", "content": f"SAY {say}"}]
    with client.messages.stream(
        model="tiny", messages=messages, max_tokens=300, tools=[WEATHER]
    ) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "tool_use", "tool_use"]
    assert [getattr(block, "input", None) for block in streamed.content[1:]] == [
        {"city": "Rome"},
        {"city": "Oslo"},
    ]
    result: Any = [
        {"type": "tool_result", "tool_use_id": rome.id, "content": "sunny"},
        {"type": "tool_result", "tool_use_id": oslo.id},
        {"type": "text", "text": "SAY </think>done"},
    ]
    history: Any = [
        *ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": result},
    ]
    again = client.messages.create(model="tiny", messages=history, max_tokens=50, tools=[WEATHER])
    assert again.content[-1].type == "text"


def test_one_tool_at_most_and_any(client: Anthropic) -> None:
    message = ask(
        client,
        f"Hm.</think>{calls_text(ROME, OSLO)}",
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    forced = ask(client, "No.¦", tools=[WEATHER], tool_choice={"type": "any"})
    assert forced.content[-1].name == "get_weather"
    assert forced.stop_reason == "tool_use"


def test_stop_sequences_and_limits(client: Anthropic) -> None:
    stopped = ask(client, "x</think>One END two", stop_sequences=["END"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert ask(client, "one two three", max_tokens=2).stop_reason == "max_tokens"
    # a limit beyond the context is lowered
    assert ask(client, "x</think>y", max_tokens=10**9).stop_reason == "end_turn"
    budget: Any = {"type": "enabled", "budget_tokens": 3}
    thinking, text = ask(client, "a b c d e f¦done", thinking=budget).content
    assert len(thinking.thinking) < len("a b c d e f")
    assert text.text == "done"


def test_system_and_counting(client: Anthropic) -> None:
    alone = client.messages.count_tokens(model="tiny", messages=ASK).input_tokens
    billing: Any = {"type": "text", "text": "x-anthropic-billing-header: 17"}
    same = client.messages.count_tokens(model="tiny", messages=ASK, system=[billing])
    assert same.input_tokens == alone
    more = client.messages.count_tokens(model="tiny", messages=ASK, system="Be brief.")
    assert more.input_tokens > alone
    with pytest.raises(anthropic.BadRequestError, match="an image"):
        client.messages.count_tokens(model="tiny", messages=PICTURE)


def test_a_last_assistant_turn_is_continued(client: Anthropic, engine_log: Any) -> None:
    """The reply goes on from it, also while thinking is on, as its default is."""
    messages: Any = [
        {"role": "user", "content": "SAY  is Paris."},
        {"role": "assistant", "content": "The capital"},
    ]
    message = client.messages.create(model="tiny", messages=messages, max_tokens=50)
    assert [(block.type, block.text) for block in message.content] == [("text", " is Paris.")]
    asked = [json.loads(line) for line in engine_log.read_text().splitlines()][-1]
    prompt = Tokenizer.from_folder(model_folder("tiny")).decode(asked["request"]["prompt_ids"])
    assert prompt.endswith("<｜Assistant｜><think></think>The capital")


def test_a_reply_that_only_thought_goes_on_thinking(client: Anthropic) -> None:
    begun: Any = {"type": "thinking", "thinking": "The capital", "signature": "x"}
    messages: Any = [
        {"role": "user", "content": "SAY  is Paris.</think>Paris."},
        {"role": "assistant", "content": [begun]},
    ]
    message = client.messages.create(model="tiny", messages=messages, max_tokens=50)
    thinking, text = message.content
    assert (thinking.thinking, text.text) == (" is Paris.", "Paris.")


def test_threads_are_refused_so_that_the_client_sends_everything(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, "x", extra_body={"thread": {"type": "create"}})
    body: Any = caught.value.body
    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return f"\nSAY </think>Sunny in {city}.\n"

    messages: Any = [{"role": "user", "content": f"SAY Hm.</think>{calls_text(ROME)}"}]
    runner = client.beta.messages.tool_runner(
        model="tiny", messages=messages, tools=[get_weather], max_tokens=300
    )
    [_, last] = list(runner)
    assert [block.text for block in last.content if block.type == "text"] == ["Sunny in Rome."]
    assert last.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("options", "status", "kind", "word"),
    [
        ({"model": "claude"}, 404, "not_found_error", "model"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"extra_body": {"temperature": 9}}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": ["x"] * 99}, 400, "invalid_request_error", "stop_sequences"),
        ({"extra_body": {"mcp_servers": [1]}}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": PICTURE}, 400, "invalid_request_error", "an image"),
    ],
)
def test_errors(client: Anthropic, options: Any, status: int, kind: str, word: str) -> None:
    arguments: Any = {"model": "tiny", "messages": ASK, "max_tokens": 5, **options}
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**arguments)
    assert caught.value.status_code == status
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert word in body["error"]["message"]


def test_a_failure_in_the_middle_of_a_stream(client: Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="request id"):
        list(ask(client, "x\nFAIL", stream=True))


def test_max_tokens_is_required(server: Server) -> None:
    answer = server.post("/v1/messages", {"model": "tiny", "messages": ASK})
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]


def test_models_in_its_own_shape(client: Anthropic) -> None:
    [model] = list(client.models.list())
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert model.created_at.year > 2000
    assert client.models.retrieve("tiny").id == "tiny"
