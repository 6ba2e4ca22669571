"""Request bodies: their fields, types and bounds.

`dsv4.chat.requests` reads the conversations themselves (messages, tools, input items).
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from dsv4.chat.fields import MAX_TEXT_CHARS
from dsv4.chat.messages import MAX_MESSAGES, MAX_TOOLS
from dsv4.request import MAX_CHOICES as MAX_GUIDE_CHOICES
from dsv4.request import MAX_GUIDE_CHARACTERS, MAX_LOGIT_BIAS, MAX_REGEX_CHARACTERS
from dsv4.server.api_error import ApiError

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_IDS = 1 << 20  # token ids in one list
MAX_ENTRIES = 1024  # per list or object that has no limit of its own
MAX_FIELDS = 256  # per body
SIZES = {
    "messages": MAX_MESSAGES,
    "input": MAX_MESSAGES,
    "system": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "logit_bias": MAX_LOGIT_BIAS,
    "prompt": MAX_IDS,
    "tokens": MAX_IDS,
    "stop": MAX_STOPS,
    "stop_sequences": MAX_STOPS,
    "guided_choice": MAX_GUIDE_CHOICES,
}

Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GUIDE_CHOICES)]
Stops = Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Object = dict[str, Any]
Objects = Annotated[list[Object], Field(fail_fast=True)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
# The conversation reader accepts more shapes; these are the documented ones.
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"type": "string", "maxLength": MAX_TEXT_CHARS},
    },
    "required": ["role", "content"],
}
Messages = Annotated[Objects, WithJsonSchema({"type": "array", "items": _MESSAGE})]
# `Service.check_ids` checks the range of ids: here a million of them would take too long.
_Id = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})]
Ids = Annotated[list[_Id], Field(fail_fast=True, max_length=MAX_IDS)]

_NO_TEMPLATE = "the prompt format is built in"
_NO_BEAMS = "answers are sampled; use n"


class Body(BaseModel):
    """Strict types; unknown fields are ignored, known but unsupported ones are refused."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    UNSUPPORTED: ClassVar[dict[str, str]] = {}

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_sizes(cls, data: Any) -> Any:
        """Runs first, because everything after it costs time per entry."""
        if isinstance(data, dict):
            check_size("body", data, MAX_FIELDS)
            for name, value in data.items():
                check_size(name, value, SIZES.get(name, MAX_ENTRIES))
        return data


def check_size(name: str, value: Any, most: int) -> None:
    if isinstance(value, list | dict) and len(value) > most:
        name = name[:80]
        text = f"{name}: found {len(value)} entries, expected at most {most}"
        raise ApiError(400, text, param=name, code="too_many_entries")


class Sampling(Body):
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")],
                Annotated[Number, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    include_usage: bool | None = None


_Schema = Object | Text
_Pattern = Annotated[str, StringConstraints(max_length=MAX_REGEX_CHARACTERS)]
_Grammar = Annotated[str, StringConstraints(max_length=MAX_GUIDE_CHARACTERS)]
_Choices = Annotated[list[Stop], Field(fail_fast=True, min_length=1, max_length=4096)]


class StructuredOutputs(BaseModel):
    """One of several ways to constrain an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_schema: _Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: _Pattern | None = None
    choice: _Choices | None = None
    grammar: _Grammar | None = None


class Guided(Sampling):
    """What chat and raw prompts share beyond sampling: guides, also under older names."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Pattern | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Grammar | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def num_choices(self) -> int:
        return max(self.n or 1, self.best_of or 1)

    def check_streaming(self) -> None:
        """Refuse combinations of fields that are not supported."""
        if self.best_of is not None and self.best_of < (self.n or 1):
            text = f"best_of: found {self.best_of} with n {self.n or 1}, expected at least as many"
            raise ApiError(400, text, param="best_of")
        if not self.stream:
            return
        for name, is_used in (
            ("best_of", self.num_choices > (self.n or 1)),
            ("prompt_logprobs", self.prompt_logprobs is not None),
        ):
            if is_used:
                text = f"{name}: found it with stream, expected a whole answer; leave out one"
                raise ApiError(400, text, param=name)


class ChatBody(Guided):
    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "there is no audio",
        "prediction": "answers are not predicted by clients",
        "web_search_options": "there is no search",
        "use_beam_search": _NO_BEAMS,
        "truncate_prompt_tokens": "shorten the conversation",
        "chat_template": _NO_TEMPLATE,
        "documents": _NO_TEMPLATE,
        "bad_words": "use logit_bias",
        "allowed_token_ids": "use logit_bias",
        "logits_processors": "code from clients is not run",
    }
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stops | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: StreamOptions | None = None
    tools: Objects | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    response_format: Object | None = None
    reasoning_effort: str | int | None = None
    thinking: Object | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None


class CompletionBody(Guided):
    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "suffix": "the model was not trained to fill in the middle",
        "use_beam_search": _NO_BEAMS,
        "truncate_prompt_tokens": "shorten the prompt",
        "response_format": "use structured_outputs",
        "logits_processors": "code from clients is not run",
    }
    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop: Stops | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None


class ResponsesBody(Sampling):
    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "background": "responses are not stored",
        "conversation": "responses are not stored; send the whole conversation in 'input'",
        "prompt": "there are no stored prompts",
        "max_tool_calls": "tools are run by the client",
        "top_logprobs": "use /v1/chat/completions",
    }
    input: Text | Messages
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    reasoning: Object | None = None
    text: Object | None = None
    tools: Objects | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None


class CountBody(Body):
    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "mcp_servers": "tools are run by the client",
        "container": "there are no containers",
    }
    messages: Messages
    system: Text | Objects | None = None
    tools: Objects | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None


class MessagesBody(CountBody, Sampling):
    max_tokens: Count
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None


class TokenizeBody(Body):
    """A raw text, or a conversation as in chat completions."""

    prompt: Text | None = None
    messages: Messages | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: Ids
