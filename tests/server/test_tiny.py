"""The embedded model behind the server: nothing is scripted here."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.server.support import ASK, PATIENCE_S, ROOT, Server, wait_for
from tests.server.test_openai import allowed


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def ask(client: OpenAI, **options: Any) -> Any:
    options.setdefault("max_tokens", 8)
    return client.chat.completions.create(model="tiny", messages=ASK, **options)


def test_it_says_its_plan_before_it_is_ready(tiny: Server) -> None:
    assert 0 <= tiny.log.find("plan: ") < tiny.log.find("ready: ")


def test_a_seed_makes_it_repeatable(client: OpenAI) -> None:
    """Alone or as one of several choices, whole or streamed; choices use neighbouring seeds."""
    options: Any = {"reasoning_effort": "none", "max_tokens": 6}
    first, second = ask(client, seed=3, n=2, **options).choices
    stream = ask(client, seed=3, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert first.message.content == text
    again = ask(client, seed=4, **options)
    assert again.choices[0].message.content == second.message.content
    assert 0 < again.usage.completion_tokens <= 6
    assert again.choices[0].finish_reason in ("stop", "length")


def test_times_and_steps_of_the_engine_are_counted(tiny: Server, client: OpenAI) -> None:
    ask(client, max_tokens=2)

    def figures() -> dict[str, float]:
        with tiny.client() as asking:
            found = re.findall(r"^dsv4:(\w+)\{[^}]*\} (\S+)$", asking.get("/metrics").text, re.M)
        return {name: float(value) for name, value in found}

    wait_for(lambda: figures().get("iteration_tokens_total_sum", 0) > 2)
    counts = figures()
    for word in ("queue", "prefill"):
        assert counts[f"request_{word}_time_seconds_count"] > 0
    assert counts["request_prefill_time_seconds_sum"] > 0


def readme_examples(kind: str) -> list[str]:
    section = (ROOT / "README.md").read_text().split("\n## Serve\n")[1].split("\n## ")[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.S)


def test_the_readmes_examples(tiny: Server, capsys: pytest.CaptureFixture[str]) -> None:
    [curl] = readme_examples("bash")
    done = subprocess.run(
        ["bash", "-c", curl.replace("http://127.0.0.1:8000", tiny.url)],
        capture_output=True,
        timeout=90,
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
    for example, word in zip(
        readme_examples("python"), ("Paris", "'thinking', 'text'"), strict=True
    ):
        names: dict[str, Any] = {}
        exec(
            compile(example.replace("http://127.0.0.1:8000", tiny.url), "README.md", "exec"), names
        )
        names["client"].close()
        assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"logit_bias": {"1": 100}}},  # the model ends inside its reasoning
        {"extra_body": {"logit_bias": {"1": 100}, "thinking_token_budget": 20}},
        {"extra_body": {"thinking_token_budget": 5}},
    ],
)
def test_a_schema_is_kept_to(client: OpenAI, options: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    done = ask(client, response_format=form, seed=1, max_tokens=200, **options)
    value = json.loads(done.choices[0].message.content)
    assert isinstance(value["city"], str)
    assert isinstance(value["big"], bool)


class Order(BaseModel):
    """A tool with arguments that the model knows nothing of."""

    model_config = ConfigDict(extra="forbid")
    size: Literal["small", "large"]
    count: Annotated[int, Field(ge=1, le=9)]
    gift: bool


def a_tool(name: str, **fields: Any) -> Any:
    parameters = Order.model_json_schema()
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


NAMED: Any = {"type": "function", "function": {"name": "order"}}
AT_ONCE: Any = {"extra_body": {"logit_bias": {"1": 100}}}  # the model would end at once


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ("required", AT_ONCE),
        (NAMED, {"reasoning_effort": "none"}),
        (allowed("order", mode="required"), AT_ONCE),
    ],
)
def test_a_forced_call_fits_its_schema(client: OpenAI, choice: Any, options: Any) -> None:
    tools: Any = [a_tool("order"), a_tool("reorder")]
    options = {"max_tokens": 300, "seed": 1, "parallel_tool_calls": False, **options}
    [call] = ask(client, tools=tools, tool_choice=choice, **options).choices[0].message.tool_calls
    Order.model_validate_json(call.function.arguments)
    assert call.function.name == "order" or choice == "required"


def test_an_answer_or_a_call(client: OpenAI) -> None:
    schema = Order.model_json_schema()
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = a_tool("order", strict=True)
    options: Any = {"max_tokens": 300, "seed": 1, "parallel_tool_calls": False, **AT_ONCE}
    message = ask(client, tools=[tool], response_format=form, **options).choices[0].message
    calls = message.tool_calls or ()
    [text] = [call.function.arguments for call in calls] or [message.content]
    Order.model_validate_json(text)


def test_echo_equals_what_the_model_said(tiny: Server, client: OpenAI) -> None:
    """The log-probability of a token at the end of a prompt is that of the token as an answer."""

    def tokens(text: str) -> Any:
        body = {"prompt": text, "add_special_tokens": False}
        return tiny.post("/tokenize", body).json()["tokens"]

    ids = tokens("The capital of France is")
    options: Any = {"model": "tiny", "logprobs": 2, "temperature": 0}
    said = client.completions.create(prompt=ids, max_tokens=1, **options).choices[0].logprobs
    [token] = tokens(said.tokens[0])
    both = client.completions.create(prompt=[*ids, token], max_tokens=0, echo=True, **options)
    scored = both.choices[0].logprobs
    assert scored.tokens[-1] == said.tokens[0]
    assert scored.token_logprobs[-1] == pytest.approx(said.token_logprobs[0], abs=1e-4)
    assert scored.top_logprobs[-1] == pytest.approx(said.top_logprobs[0], abs=1e-4)


def test_who_leaves_frees_the_engine(tiny: Server) -> None:
    body = {"prompt": "The river", "stream": True, "max_tokens": 5000, "temperature": 0}
    body["logit_bias"] = no_end(tiny)
    path = "/v1/completions"
    with tiny.client() as client, client.stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()  # to lose it would be to leave
        next(lines)
        wait_for(lambda: tiny.stats()["num_running"] > 0)
    tiny.wait_until_idle()
    assert not any(tiny.stats()["pages_used"].values())


def no_end(server: Server) -> dict[str, float]:
    """A bias against every marker that ends an answer."""
    names = ("end▁of▁sentence", "User", "Assistant", "begin▁of▁sentence", "latest_reminder")
    texts = [f"<｜{name}｜>" for name in names]
    bodies = [{"prompt": text, "add_special_tokens": False} for text in texts]
    return {str(server.post("/tokenize", body).json()["tokens"][0]): -100.0 for body in bodies}
