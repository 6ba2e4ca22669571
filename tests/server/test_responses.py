"""/v1/responses, /v1/completions, /v1/models and the tokenizer, with scripted answers."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.support import ASK, PATIENCE_S, Server
from tests.server.test_openai import ROME, Person, calls_text

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    base = f"{server.url}/v1"
    with OpenAI(base_url=base, api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def respond(client: OpenAI, say: str, **options: Any) -> Any:
    return client.responses.create(model="tiny", input=f"SAY {say}", **options)


def test_items_of_a_response(client: OpenAI) -> None:
    done = respond(client, f"Hm.</think>Looking.{calls_text(ROME)}", tools=[TOOL])
    assert done.status == "completed"
    reasoning, message, call = done.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == done.output_text == "Looking."
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert done.usage.input_tokens_details.cached_tokens == 4
    assert done.usage.output_tokens_details.reasoning_tokens > 0
    # items go back as they came, with the result behind them
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [*ASK, reasoning, message, call, output]
    again = client.responses.create(model="tiny", input=items, tools=[TOOL])
    assert again.status == "completed"


def test_events_of_a_response(client: OpenAI) -> None:
    events = list(
        respond(client, f"Hm.</think>Looking.{calls_text(ROME)}", tools=[TOOL], stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    once = [kind for kind in kinds if not kind.endswith(".delta")]
    part = ["response.content_part.added"]
    assert once[2:-1] == [
        "response.output_item.added",
        *part,
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        *part,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "Looking."


def test_the_stream_helper(client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="SAY Hm.</think>Hello.") as stream:
        for _ in stream:
            pass
        done = stream.get_final_response()
    assert done.output_text == "Hello."


def test_parse_and_limits(client: OpenAI) -> None:
    say = 'SAY </think>{"name": "Ada", "age": 36}'
    done = client.responses.parse(model="tiny", input=say, text_format=Person)
    assert done.output_parsed == Person(name="Ada", age=36)
    cut = respond(client, "one two three", max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert respond(client, "Four.", reasoning={"effort": "none"}).output_text == "Four."


def test_what_responses_refuse(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not stored"):
        respond(client, "x", previous_response_id="resp_1")
    picture: Any = {"type": "input_image", "image_url": "https://example.org/a.png"}
    items: Any = [{"role": "user", "content": [picture]}]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: found an image"):
        client.responses.create(model="tiny", input=items)
    stored: Any = [*ASK, {"type": "item_reference", "id": "msg_7"}]
    with pytest.raises(openai.BadRequestError, match=r"'msg_7'.*the item itself.*store: false"):
        client.responses.create(model="tiny", input=stored)
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        respond(client, "x", top_logprobs=3)
    with pytest.raises(openai.BadRequestError, match="truncation"):
        respond(client, "x", truncation="auto")


def test_a_response_that_fails(client: OpenAI) -> None:
    events = list(respond(client, "x\nFAIL", stream=True))
    assert events[-1].type == "response.failed"
    assert "request id" in events[-1].response.error.message


# --- completions ------------------------------------------------------------------------------


def complete(client: OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **options)


RAW = "<｜User｜>SAY one</think>two<｜Assistant｜>"


def test_completions_are_not_parsed(client: OpenAI) -> None:
    done = complete(client, RAW, max_tokens=50)
    assert done.choices[0].text == "one</think>two"
    assert done.choices[0].finish_reason == "stop"
    assert done.id.startswith("cmpl-")
    long = RAW.replace("two", "two and a half and so on and on and on")
    assert complete(client, long).usage.completion_tokens == 16  # unless asked for more
    chunks = list(complete(client, RAW, max_tokens=50, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one</think>two"


def test_several_prompts_and_choices(client: OpenAI) -> None:
    done = complete(client, [RAW, RAW.replace("two", "three")], n=2, max_tokens=50)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [choice.text.split(">")[1] for choice in done.choices] == [
        "two",
        "two",
        "three",
        "three",
    ]


def test_token_ids_as_prompt(client: OpenAI, server: Server) -> None:
    body = {"prompt": RAW, "add_special_tokens": False}
    ids = server.post("/tokenize", body).json()["tokens"]
    assert complete(client, ids, max_tokens=50).choices[0].text == "one</think>two"
    both = complete(client, [ids, ids], max_tokens=50)
    assert [choice.text for choice in both.choices] == ["one</think>two"] * 2


def test_ids_and_text_are_the_same_prompt(client: OpenAI, server: Server, engine_log: Any) -> None:
    """Both get the begin marker; evaluation tools send either and expect the same figures."""
    body = {"prompt": "one two", "add_special_tokens": False}
    bare = server.post("/tokenize", body).json()["tokens"]
    whole = server.post("/tokenize", {"prompt": "one two"}).json()["tokens"]
    assert whole[1:] == bare
    for prompt, extra, wanted in (
        ("one two", {}, whole),
        (bare, {}, whole),
        (whole, {}, whole),
        (bare, {"add_special_tokens": False}, bare),
        ("", {}, whole[:1]),
    ):
        done = complete(client, prompt, echo=True, max_tokens=1, logprobs=0, extra_body=extra)
        asked = [json.loads(line) for line in engine_log.read_text().splitlines()]
        request = [message["request"] for message in asked if message["kind"] == "add"][-1]
        assert request["prompt_ids"] == wanted
        shown = len(wanted) - (len(wanted) - len(bare) if prompt != whole else 0)
        assert len(done.choices[0].logprobs.tokens) == (shown if prompt else 0) + 1


def test_echo_scores_the_prompt(client: OpenAI) -> None:
    done = complete(client, "abc", echo=True, max_tokens=0, logprobs=1)
    choice = done.choices[0]
    assert choice.text == "abc"  # not the marker that the server puts before it
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert set(logprobs.token_logprobs[1:]) == {-1.0}
    assert len(logprobs.top_logprobs[1]) == 1
    assert "".join(logprobs.tokens) == choice.text
    for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[at : at + len(token)] == token
    assert done.usage.completion_tokens == 0
    own = complete(client, "<｜begin▁of▁sentence｜>abc", echo=True, max_tokens=0, logprobs=1)
    assert own.choices[0].text == "<｜begin▁of▁sentence｜>abc"
    assert own.usage.prompt_tokens == done.usage.prompt_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_offsets_count_characters(client: OpenAI, server: Server, stream: bool) -> None:
    """Also where a character has several tokens: each begins where the character does."""
    prompt = "a\U0001fae8b\U0001fae8 é"
    options: Any = {"echo": True, "max_tokens": 2, "logprobs": 0, "stream": stream}
    done = complete(client, prompt, **options)
    choices = [chunk.choices[0] for chunk in done] if stream else [done.choices[0]]
    text = "".join(choice.text for choice in choices)
    assert text.startswith(prompt)
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in logprobs for token in part.tokens]
    offsets = [at for part in logprobs for at in part.text_offset]
    assert offsets == sorted(offsets)
    assert any(token.startswith("\\x") for token in tokens)  # a part of a character
    for token, at in zip(tokens, offsets, strict=True):
        if not token.startswith(("\\x", "<｜")):
            assert text[at : at + len(token)] == token


def test_the_best_of_several(client: OpenAI) -> None:
    raw = "<｜User｜>SAY one {index}<｜Assistant｜>"
    done = complete(client, [raw, raw], max_tokens=50, extra_body={"best_of": 2})
    # the engine of the test gives its second answer of all the better log-probabilities
    assert [choice.text for choice in done.choices] == ["one 1", "one 2"]
    assert [choice.index for choice in done.choices] == [0, 1]
    assert done.choices[0].logprobs is None


def test_log_probabilities_of_the_prompt(client: OpenAI) -> None:
    done = complete(client, "abc", max_tokens=1, extra_body={"prompt_logprobs": 0})
    first, *rest = done.choices[0].prompt_logprobs
    assert first is None
    assert len(rest) == done.usage.prompt_tokens - 1
    assert all(value["logprob"] == -1.0 for item in rest for value in item.values())


def test_what_completions_refuse(client: OpenAI) -> None:
    for options, word in (
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 10**6}, "prompt"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            complete(client, "x", **options)
    for prompt in ([], [[]], [1, "x"], [-1]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            complete(client, prompt)


# --- models and tokens ------------------------------------------------------------------------


def test_models(client: OpenAI, server: Server) -> None:
    [model] = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").max_model_len == 4096  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.models.retrieve("gpt")
    with server.client() as http:
        assert http.get("/models").json() == http.get("/v1/models").json()


def test_tokens_there_and_back(server: Server) -> None:
    text = "Grüße, <｜User｜>!"
    ids = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    back = server.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"]
    assert back == "<｜begin▁of▁sentence｜>" + text
    chat = server.post("/tokenize", {"messages": ASK, "thinking": {"type": "disabled"}}).json()
    prompt = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert prompt.endswith("<｜User｜>hi<｜Assistant｜></think>")
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400
