"""The openai and anthropic packages, and litellm above them."""

from typing import Any

import anthropic
import openai
import pytest
from conftest import QUESTION, City, weather

ASK: Any = [{"role": "user", "content": QUESTION}]
QUIET: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 40}
OFF: Any = {"reasoning_effort": "none"}
# the newest anthropic package has no name for a temperature any more
CLAUDE: Any = {
    "model": "tiny",
    "messages": ASK,
    "max_tokens": 100,
    "thinking": {"type": "disabled"},
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(url: str) -> Any:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_openai_chat_and_stream(client: Any) -> None:
    done = client.chat.completions.create(**QUIET, **OFF)
    assert "Paris" in done.choices[0].message.content
    stream = client.chat.completions.create(**QUIET, **OFF, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == done.choices[0].message.content


@pytest.mark.parametrize("extra", [{}, {"logit_bias": {"1": 100}}], ids=["free", "ends at once"])
def test_openai_parse_while_thinking(client: Any, extra: Any) -> None:
    options = {**QUIET, "max_tokens": 600, "extra_body": {"thinking_token_budget": 40, **extra}}
    done = client.chat.completions.parse(**options, response_format=City)
    assert isinstance(done.choices[0].message.parsed, City)


def test_openai_strict_tools(client: Any) -> None:
    tool = openai.pydantic_function_tool(City)
    done = client.chat.completions.parse(
        **{**QUIET, "max_tokens": 100},
        **OFF,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = done.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)


def test_openai_responses(client: Any) -> None:
    quiet: Any = {"model": "tiny", "input": QUESTION, "temperature": 0}
    off: Any = {"reasoning": {"effort": "none"}}
    assert "Paris" in client.responses.create(**quiet, **off, max_output_tokens=40).output_text
    with client.responses.stream(**quiet, **off, max_output_tokens=40) as stream:
        for _ in stream:
            pass
        assert "Paris" in stream.get_final_response().output_text
    done = client.responses.parse(**quiet, **off, text_format=City, max_output_tokens=100)
    assert isinstance(done.output_parsed, City)


def test_openai_completions(client: Any) -> None:
    done = client.completions.create(
        model="tiny", prompt="one two three", max_tokens=1, echo=True, logprobs=1
    )
    assert done.choices[0].text.startswith("one two three")


def test_anthropic(claude: Any) -> None:
    assert "Paris" in claude.messages.create(**CLAUDE).content[0].text
    with claude.messages.stream(**CLAUDE) as stream:
        assert "Paris" in stream.get_final_message().content[0].text
    begun = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    message = claude.messages.create(**{**CLAUDE, "messages": begun})
    assert "Paris" in message.content[0].text
    assert claude.messages.count_tokens(model="tiny", messages=ASK).input_tokens > 0
    assert [model.id for model in claude.models.list()] == ["tiny"]


def test_anthropic_tool_runner(claude: Any) -> None:
    """It asks for a thread first, which the server refuses, and goes on without one."""
    tools = [anthropic.beta_tool(weather)]
    messages = list(claude.beta.messages.tool_runner(**CLAUDE, tools=tools, max_iterations=2))
    assert 1 <= len(messages) <= 2
    assert messages[0].content


def test_anthropic_forced_tool(claude: Any) -> None:
    tool = anthropic.beta_tool(weather).to_dict()
    choice = {"type": "tool", "name": "weather"}
    message = claude.messages.create(**CLAUDE, tools=[tool], tool_choice=choice)
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.input["unit"] in ("c", "f")


def test_litellm(url: str) -> None:
    import litellm

    options: Any = {
        "model": "openai/tiny",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 60,
        "extra_body": {"thinking": {"type": "disabled"}},
    }
    assert "Paris" in litellm.completion(**options).choices[0].message.content
    chunks = list(litellm.completion(**options, stream=True))
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    done = litellm.completion(**options, response_format=City)
    City.model_validate_json(done.choices[0].message.content)
    tool = openai.pydantic_function_tool(City)
    done = litellm.completion(**options, tools=[tool], tool_choice="required")
    City.model_validate_json(done.choices[0].message.tool_calls[0].function.arguments)


def test_litellm_anthropic(url: str) -> None:
    """This provider cannot switch thinking off for a model it does not know."""
    import litellm

    done = litellm.completion(
        model="anthropic/tiny",
        api_base=url,
        api_key="none",
        messages=ASK,
        temperature=0,
        max_tokens=200,
    )
    message = done.choices[0].message
    assert "Paris" in f"{message.reasoning_content} {message.content}"
