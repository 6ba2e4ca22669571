"""Frameworks that build on the SDKs: what they make of answers, typed outputs and tools."""

import asyncio
from typing import Any

from conftest import QUESTION, City, weather

OFF = {"reasoning_effort": "none"}


def test_langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=100,
        max_retries=0,
        extra_body=OFF,
    )
    assert "Paris" in model.invoke(QUESTION).content
    assert "Paris" in "".join(str(chunk.content) for chunk in model.stream(QUESTION))
    for method in ("json_schema", "function_calling"):
        typed = model.with_structured_output(City, method=method)
        assert isinstance(typed.invoke(QUESTION), City)
    call = model.bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls[0]
    assert call["args"]["unit"] in ("c", "f")


def test_langchain_openai_while_thinking(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=600,
        max_retries=0,
        extra_body={"thinking_token_budget": 40},
    )
    assert isinstance(model.with_structured_output(City).invoke(QUESTION), City)


def test_langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model="tiny",
        base_url=url,
        api_key="none",
        temperature=0,
        max_tokens=100,
        max_retries=0,
        thinking={"type": "disabled"},
    )
    assert "Paris" in str(model.invoke(QUESTION).content)
    assert isinstance(model.with_structured_output(City).invoke(QUESTION), City)


def test_llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="tiny",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        max_retries=0,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        max_tokens=100,
        context_window=4096,
        additional_kwargs={"extra_body": {"thinking": {"type": "disabled"}}},
    )
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert "Paris" in str(model.chat(messages).message.content)
    pieces = [piece.delta or "" for piece in model.stream_chat(messages)]
    assert "Paris" in "".join(pieces)
    assert isinstance(model.structured_predict(City, PromptTemplate(QUESTION)), City)


def test_instructor(url: str) -> None:
    import instructor
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client: Any = instructor.from_openai(plain, mode=mode)
            city = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": QUESTION}],
                response_model=City,
                max_retries=0,
                temperature=0,
                max_tokens=100,
                **OFF,
            )
            assert isinstance(city, City)


def test_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    model = OpenAIChatModel("tiny", provider=provider)
    settings: Any = {"temperature": 0, "max_tokens": 100, "extra_body": OFF}
    agent = Agent(model, model_settings=settings)
    assert "Paris" in agent.run_sync(QUESTION).output
    for kind in (NativeOutput, ToolOutput):
        typed = Agent(model, output_type=kind(City), model_settings=settings, retries=0)
        assert isinstance(typed.run_sync(QUESTION).output, City)


def test_openai_agents(url: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    settings = ModelSettings(temperature=0, max_tokens=100, extra_body=OFF)
    responses = ModelSettings(
        temperature=0, max_tokens=100, extra_body={"reasoning": {"effort": "none"}}
    )

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chat = OpenAIChatCompletionsModel("tiny", openai_client=client)
            agent = Agent(name="a", model=chat, model_settings=settings)
            assert "Paris" in (await Runner.run(agent, QUESTION)).final_output
            typed = Agent(name="b", model=chat, model_settings=settings, output_type=City)
            assert isinstance((await Runner.run(typed, QUESTION)).final_output, City)
            newer = OpenAIResponsesModel("tiny", openai_client=client)
            agent = Agent(name="c", model=newer, model_settings=responses)
            assert "Paris" in (await Runner.run(agent, QUESTION)).final_output
            forced = Agent(
                name="d",
                model=chat,
                tools=[function_tool(weather)],
                model_settings=settings.resolve(ModelSettings(tool_choice="required")),
                tool_use_behavior="stop_on_first_tool",
            )
            assert "20 degrees" in (await Runner.run(forced, QUESTION)).final_output

    asyncio.run(run())
