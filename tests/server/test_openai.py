"""The openai package against a running server: scripted answers for exactness, tiny for truth."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.support import ASK, PATIENCE_S, Server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {}}}


def allowed(*names: str, mode: str = "auto") -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def call_text(name: str, city: str) -> str:
    return (
        f'<｜DSML｜invoke name="{name}">\\n<｜DSML｜parameter name="city" string="true">{city}'
        "</｜DSML｜parameter>\\n</｜DSML｜invoke>"
    )


def calls_text(*calls: str) -> str:
    return "<｜DSML｜tool_calls>\\n" + "\\n".join(calls) + "\\n</｜DSML｜tool_calls>"


ROME = call_text("get_weather", "Rome")
OSLO = call_text("get_weather", "Oslo")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def ask(client: OpenAI, say: str, **options: Any) -> Any:
    options.setdefault("max_tokens", 300)
    messages: Any = [{"role": "user", "content": f"SAY {say}"}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_reasoning_and_answer(client: OpenAI) -> None:
    done = ask(client, "Let me think.</think>Four.")
    message = done.choices[0].message
    assert message.content == "Four."
    assert message.reasoning_content == message.reasoning == "Let me think."
    assert message.tool_calls is None
    assert done.choices[0].finish_reason == "stop"
    assert done.model == "tiny"
    assert done.id.startswith("chatcmpl-")
    usage = done.usage
    assert usage.prompt_tokens_details.cached_tokens == 4
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 2)
    reasoning = details.reasoning_tokens
    assert 0 < reasoning < usage.completion_tokens
    # reasoning, its closing marker, the answer, the end marker
    assert usage.completion_tokens >= reasoning + 2
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_thinking_can_be_switched_off(client: OpenAI, options: Any) -> None:
    message = ask(client, "Four.", **options).choices[0].message
    assert message.content == "Four."
    assert not hasattr(message, "reasoning_content")


def test_reasoning_can_be_left_out(client: OpenAI) -> None:
    say = "Thinking.</think>Four."
    message = ask(client, say, extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "Four."
    assert not hasattr(message, "reasoning_content")
    chunks = list(ask(client, say, stream=True, extra_body={"include_reasoning": False}))
    assert "Thinking" not in "".join(chunk.to_json() for chunk in chunks)


def test_streamed_deltas(client: OpenAI) -> None:
    stream = ask(
        client, "Hm.</think>An answer.", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    first, last = chunks[0].choices[0], chunks[-2].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert last.finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    reasoning = "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas)
    assert reasoning == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "An answer."
    both = [d for d in deltas if d.content and getattr(d, "reasoning_content", None)]
    assert not both


def test_tool_calls(client: OpenAI) -> None:
    done = ask(client, f"Hm.</think>Looking.\\n\\n{calls_text(ROME, OSLO)}", tools=[WEATHER])
    choice = done.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    first, second = choice.message.tool_calls
    assert first.function.name == second.function.name == "get_weather"
    assert json.loads(first.function.arguments) == {"city": "Rome"}
    assert json.loads(second.function.arguments) == {"city": "Oslo"}
    assert first.id != second.id
    # and the conversation goes on with what came back
    result = {"role": "tool", "tool_call_id": first.id, "content": "sunny"}
    other = {"role": "tool", "tool_call_id": second.id, "content": "snow"}
    messages: Any = [*ASK, choice.message, result, other]
    again = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    assert again.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_that_a_client_dropped_is_restored(
    client: OpenAI, engine_log: Any, stream: bool
) -> None:
    say = f"Rome it is.</think>{calls_text(ROME)}"
    done = ask(client, say, tools=[WEATHER], stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in done]
        call_id = next(delta.tool_calls[0].id for delta in deltas if delta.tool_calls)
    else:
        call_id = done.choices[0].message.tool_calls[0].id
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    call = {"id": call_id, "type": "function", "function": function}
    messages: Any = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
    ]

    def prompt_len() -> int:
        client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
        asked = [json.loads(line) for line in engine_log.read_text().splitlines()]
        last = [message for message in asked if message["kind"] == "add"][-1]
        return len(last["request"]["prompt_ids"])

    restored = prompt_len()
    messages[1]["reasoning_content"] = "Rome it is."
    assert prompt_len() == restored
    messages[1]["reasoning_content"] = "Rome it is. And more of that."
    assert prompt_len() > restored


def test_content_is_null_beside_calls(client: OpenAI) -> None:
    done = ask(client, f"Hm.</think>{calls_text(ROME)}", tools=[WEATHER])
    assert done.choices[0].message.content is None


def test_streamed_tool_calls(client: OpenAI) -> None:
    stream = ask(client, f"Hm.</think>{calls_text(ROME, OSLO)}", tools=[WEATHER], stream=True)
    found: dict[int, dict[str, str]] = {}
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index not in found:
                assert call.id
                assert call.type == "function"
                found[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            else:
                assert call.id is None
                assert call.function.name is None
            found[call.index]["arguments"] += call.function.arguments
    assert [json.loads(call["arguments"])["city"] for call in found.values()] == ["Rome", "Oslo"]
    assert list(found) == [0, 1]
    assert chunk.choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_agrees_with_the_whole(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"SAY Hm.</think>{calls_text(ROME)}"}]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    [call] = done.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_one_call_at_most(client: OpenAI) -> None:
    say = f"Hm.</think>{calls_text(ROME, OSLO)}"
    done = ask(client, say, tools=[WEATHER], parallel_tool_calls=False)
    [call] = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert done.choices[0].finish_reason == "tool_calls"


def test_no_tools_no_calls(client: OpenAI) -> None:
    done = ask(client, calls_text(ROME), tools=[WEATHER], tool_choice="none")
    assert done.choices[0].message.tool_calls is None


@pytest.mark.parametrize("thinks", [True, False])
def test_a_named_tool_is_called_whatever_the_model_wants(client: OpenAI, thinks: bool) -> None:
    inside = '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\\n'
    say = f"I would rather not.</think>¦{inside}" if thinks else inside
    done = ask(
        client,
        say,
        tools=[WEATHER, TIME],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        reasoning_effort="high" if thinks else "none",
    )
    [call] = done.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert done.choices[0].finish_reason == "tool_calls"
    if thinks:
        assert done.choices[0].message.reasoning_content == "I would rather not."


def test_a_forced_call_comes_after_reasoning_that_was_never_closed(client: OpenAI) -> None:
    done = ask(client, "I am done.¦", tools=[TIME], tool_choice="required")
    message = done.choices[0].message
    assert message.reasoning_content == "I am done."
    assert [call.function.name for call in message.tool_calls] == ["get_time"]
    assert message.tool_calls[0].function.arguments == "{}"


def test_required_lets_the_model_choose_among_the_tools(client: OpenAI) -> None:
    # the second phase begins with the tool's name, which the real engine constrains
    say = 'Hm.</think>¦get_time">\\n'
    done = ask(client, say, tools=[WEATHER, TIME], tool_choice="required")
    assert [call.function.name for call in done.choices[0].message.tool_calls] == ["get_time"]


def test_a_call_inside_the_reasoning_is_the_call_that_was_required(client: OpenAI) -> None:
    done = ask(client, f"Hm.{calls_text(ROME)}¦no", tools=[WEATHER], tool_choice="required")
    [call] = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_thinking_budget(client: OpenAI) -> None:
    done = ask(client, "a b c d e f g h¦The answer.", extra_body={"thinking_token_budget": 3})
    message = done.choices[0].message
    assert message.content == "The answer."
    assert 0 < len(message.reasoning_content) < len("a b c d e f g h")
    assert done.usage.completion_tokens_details.reasoning_tokens == 3


def test_stop_strings_end_the_answer_and_not_the_reasoning(client: OpenAI) -> None:
    done = ask(client, "END it?</think>One END two", stop=["END", "never"])
    choice = done.choices[0]
    assert choice.message.reasoning_content == "END it?"
    assert choice.message.content == "One "
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "END"


def test_length(client: OpenAI) -> None:
    done = ask(client, "one two three four", max_completion_tokens=2, max_tokens=300)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 2


def test_several_choices(client: OpenAI) -> None:
    done = ask(client, "x</think>y", n=3)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert {choice.message.content for choice in done.choices} == {"y"}
    seen: dict[int, str] = {}
    for chunk in ask(client, "x</think>y", n=3, stream=True):
        choice = chunk.choices[0]
        seen[choice.index] = seen.get(choice.index, "") + (choice.delta.content or "")
    assert seen == {0: "y", 1: "y", 2: "y"}


def test_logprobs_by_part(client: OpenAI) -> None:
    done = ask(client, "why</think>yes", logprobs=True, top_logprobs=2)
    logprobs = done.choices[0].logprobs
    assert "".join(entry.token for entry in logprobs.content) == "yes"
    assert "".join(entry["token"] for entry in logprobs.reasoning_content) == "why"
    entry = logprobs.content[0]
    assert entry.logprob == -0.25
    assert bytes(entry.bytes).decode() == entry.token
    assert len(entry.top_logprobs) == 2
    tokens = []
    for chunk in ask(client, "why</think>yes", logprobs=True, stream=True):
        found = chunk.choices[0].logprobs
        tokens += [entry.token for entry in found.content] if found else []
    assert "".join(tokens) == "yes"


def test_a_continued_message(client: OpenAI, server: Server) -> None:
    messages: Any = [
        {"role": "user", "content": "SAY  is Paris."},
        {"role": "assistant", "content": "The capital", "prefix": True},
    ]
    done = client.chat.completions.create(
        model="tiny", messages=messages, reasoning_effort="none", max_tokens=50
    )
    assert done.choices[0].message.content == " is Paris."


def test_the_engine_gets_what_was_asked(client: OpenAI, server: Server, engine_log: Any) -> None:
    ask(
        client,
        "ok",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        n=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "cache_salt": "me"},
        response_format={"type": "json_object"},
    )
    asked = [json.loads(line) for line in engine_log.read_text().splitlines()]
    requests = [message["request"] for message in asked if message["kind"] == "add"][-2:]
    params = requests[0]["params"]
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "stop": [],
    }
    assert {name: params[name] for name in wanted} == wanted
    assert params["guide"]["kind"] == "json_object"
    assert params["guide"]["after_id"] is not None  # only the answer is constrained
    assert requests[1]["params"]["seed"] == 8
    assert requests[0]["cache_salt"] == "me"


def test_ends_can_be_ignored(client: OpenAI, engine_log: Any) -> None:
    """The markers are dropped; the answer goes on to its limit."""
    say = "Hm.</think>one<｜end▁of▁sentence｜>two<｜User｜> three"
    # SAY is read to the end of the user's turn, so the text comes by its token ids' spelling
    done = ask(client, say.replace("<｜User｜>", ""), max_tokens=6, extra_body={"ignore_eos": True})
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 6
    details = done.usage.completion_tokens_details
    assert details.rejected_prediction_tokens == 2 * len(done.choices)
    assert last_params(engine_log)["stop_ids"] == []
    ask(client, "ok", max_tokens=6, extra_body={"min_tokens": 4})
    assert last_params(engine_log)["min_tokens"] == 4


def test_the_best_of_several(client: OpenAI) -> None:
    """The engine of the test gives the second choice the better log-probabilities."""
    done = ask(client, "Hm.</think>answer {index}", n=1, extra_body={"best_of": 3})
    [choice] = done.choices
    assert choice.index == 0
    assert choice.message.content == "answer 1"
    assert choice.logprobs is None
    whole = ask(client, "Hm.</think>answer {index}", n=3)
    assert [c.message.content for c in whole.choices] == ["answer 0", "answer 1", "answer 2"]
    assert done.usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities_of_the_prompt(client: OpenAI) -> None:
    done = ask(client, "ok", extra_body={"prompt_logprobs": 1})
    first, *rest = done.prompt_logprobs
    assert first is None
    assert len(rest) == done.usage.prompt_tokens - 1
    values = list(rest[0].values())
    assert values[0] == {"logprob": -1.0, "rank": None, "decoded_token": values[0]["decoded_token"]}
    assert rest[0]["1"]["rank"] == 1


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"guided_json": {"type": "object"}}, "json_schema"),
        ({"guided_json": '{"type": "object"}'}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "choice"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
    ],
)
def test_names_of_guides(client: OpenAI, engine_log: Any, fields: Any, kind: str) -> None:
    ask(client, "Hm.</think>a", extra_body=fields)
    assert last_params(engine_log)["guide"]["kind"] == kind
    client.completions.create(model="tiny", prompt="x", extra_body=fields)
    guide = last_params(engine_log)["guide"]
    assert (guide["kind"], guide["after_id"]) == (kind, None)


@pytest.mark.parametrize("effort", ["high", "none"])
def test_a_guided_answer_keeps_its_first_newline(client: OpenAI, effort: str) -> None:
    say = "Hm.</think>\\nx" if effort == "high" else "\\nx"
    guided: Any = {"structured_outputs": {"choice": ["\nx"]}}
    assert (
        ask(client, say, reasoning_effort=effort, extra_body=guided).choices[0].message.content
        == "\nx"
    )
    assert ask(client, say, reasoning_effort=effort).choices[0].message.content == "x"


def last_params(engine_log: Any) -> Any:
    asked = [json.loads(line) for line in engine_log.read_text().splitlines()]
    return [message["request"]["params"] for message in asked if message["kind"] == "add"][-1]


def last_guides(engine_log: Any) -> list[Any]:
    asked = [json.loads(line) for line in engine_log.read_text().splitlines()]
    adds = [message["request"]["params"]["guide"] for message in asked if message["kind"] == "add"]
    return adds[-2:]


def test_which_calls_are_guided(client: OpenAI, engine_log: Any) -> None:
    """Strict tools and some of several: free text, and a grammar from the marker on."""
    ask(client, "ok", tools=[WEATHER, TIME])
    assert last_guides(engine_log)[-1] is None
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    ask(client, "ok", tools=[strict, TIME])
    guide = last_guides(engine_log)[-1]
    assert (guide["kind"], guide["must_come"]) == ("structure", False)
    assert guide["after_id"] is not None
    assert "get_time" in json.dumps(guide["value"])
    ask(client, "ok", tools=[WEATHER, TIME], tool_choice=allowed("get_weather"))
    guide = last_guides(engine_log)[-1]
    assert "get_weather" in json.dumps(guide["value"])
    assert "get_time" not in json.dumps(guide["value"])
    # with a format of the answer, behind the reasoning: either
    ask(client, "ok", tools=[WEATHER], response_format={"type": "json_object"})
    guide = last_guides(engine_log)[-1]
    assert guide["must_come"]
    assert guide["value"]["type"] == "or"


class Person(BaseModel):
    name: str
    age: int


def test_parse_with_a_schema(client: OpenAI, engine_log: Any) -> None:
    messages: Any = [{"role": "user", "content": 'SAY </think>{"name": "Ada", "age": 36}'}]
    done = client.chat.completions.parse(model="tiny", messages=messages, response_format=Person)
    assert done.choices[0].message.parsed == Person(name="Ada", age=36)
    last = [json.loads(line) for line in engine_log.read_text().splitlines()][-1]
    assert last["request"]["params"]["guide"]["value"]["required"] == ["name", "age"]


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"model": "gpt"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
        (
            {
                "messages": [
                    *ASK,
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                ]
            },
            400,
            "messages[1]",
        ),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"stop": ["x"] * 17}, 400, "stop"),
        ({"stop": ["x", ""]}, 400, "stop[1]"),
        ({"n": 1000}, 400, "n"),
        ({"n": 0}, 400, "n"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, 400, None),
        ({"logit_bias": {str(n): 1 for n in range(2000)}}, 400, "logit_bias"),
        ({"max_tokens": 100_000}, 400, "messages"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"extra_body": {"use_beam_search": True}}, 400, "use_beam_search"),
        ({"n": 3, "extra_body": {"best_of": 2}}, 400, "best_of"),
        ({"stream": True, "extra_body": {"best_of": 2}}, 400, "best_of"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 0}}, 400, "prompt_logprobs"),
        ({"extra_body": {"min_tokens": 6}}, 400, "min_tokens"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, 400, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {}}}, 400, "structured_outputs"),
        ({"tools": [WEATHER], "tool_choice": allowed("get_time")}, 400, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed()}, 400, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, 400, "response_format.type"),
        (
            {
                "messages": [*ASK, {"role": "assistant", "content": "{", "prefix": True}],
                "response_format": {"type": "json_object"},
            },
            400,
            "response_format",
        ),
        ({"reasoning_effort": "colossal"}, 400, "reasoning_effort"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, 400, None),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, 400, None),
    ],
    ids=str,
)
def test_errors_name_the_field(
    client: OpenAI, options: Any, status: int, param: str | None
) -> None:
    arguments: Any = {"model": "tiny", "messages": ASK, "max_tokens": 5, **options}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**arguments)
    error = caught.value
    assert error.status_code == status
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    assert error.type == kinds[status]
    if param is not None:
        assert error.param == param
        assert param.split("[")[0] in error.message
    assert error.response.headers["x-should-retry"] == "false"


def test_a_failure_in_the_middle_of_a_stream(client: OpenAI) -> None:
    with pytest.raises(openai.APIError, match="request id") as caught:
        list(ask(client, "x\nFAIL", stream=True))
    assert "/secret" not in str(caught.value)
    with pytest.raises(openai.InternalServerError):
        ask(client, "x\nFAIL")


def test_a_refusal_by_the_engine_is_a_client_error(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="too strange"):
        ask(client, "x\nREFUSE too strange", stream=True)


def test_timeouts_of_the_client_abort_the_request(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.3), "x\nHANG")
    server.wait_until_idle()
