"""From a validated body to engine requests: prompt, sampling, and the phases of an answer.

Most answers have one phase. A thinking budget or a forced call splits an answer after its
reasoning: the engine stops there, tokens are inserted, and generation continues from them. The
prefix cache makes continuing cheap.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4.chat import Conversation, Prompt, Tokenizer, texts
from dsv4.chat.fields import fail, read_object, read_text, show
from dsv4.chat.lexer import split_markers
from dsv4.chat.messages import Image
from dsv4.chat.output.call_grammar import CallGrammar, answer_or_calls
from dsv4.chat.tool_choice import ToolChoice
from dsv4.request import Guide, SamplingParams
from dsv4.server.options import DEFAULT_MAX_TOKENS, MAX_LOGPROBS
from dsv4.server.schemas import Guided, Sampling
from dsv4.server.service import Service


@dataclass(frozen=True)
class Phase:
    """`forced` tokens come first; then the model generates until `until` or `limit`."""

    forced: tuple[int, ...] = ()
    guide: Guide | None = None
    until: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class GenerationPlan:
    """One request for `num_choices` answers."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    phases: tuple[Phase, ...] = (Phase(),)
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    parallel_calls: bool = True
    ignores_end: bool = False  # drop the model's end markers and continue
    priority: int = 0
    cache_salt: str = ""

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities that an answer may return, alternatives included."""
        params = self.params
        each = 0 if params.logprobs is None else 1 + params.logprobs
        return self.num_choices * params.max_tokens * each


def sampling_params(body: Sampling, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Omitted fields keep the engine's defaults."""
    top_k = None if body.top_k is None else max(body.top_k, 0)  # -1 means "off" in other servers
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": top_k,
        "min_p": body.min_p,
        "seed": body.seed,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": bias,
        "logprobs": logprobs,
        "min_tokens": body.min_tokens,
    }
    if (body.min_tokens or 0) > max_tokens:
        fail("min_tokens", str(body.min_tokens), f"at most max_tokens, which is {max_tokens}")
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_tokens=max_tokens, **values)


def plan_chat(
    service: Service,
    conversation: Conversation,
    sampling: Sampling,
    *,
    asked: int | None,
    is_lowered: bool = False,
    budget: int | None = None,
    guide: Guide | None = None,
    stops: tuple[str, ...] = (),
    logprobs: int | None = None,
    num_choices: int = 1,
    parallel_calls: bool = True,
    is_whole: bool = False,
) -> GenerationPlan:
    """The plan for a conversation. `asked`: max tokens; `is_lowered`: clip it to the context.

    `is_whole`: the answer is returned in one response, with its log-probabilities.
    """
    prompt = service.reasoning_cache.restore(refuse_images(conversation)).encode(service.dialect)
    ids = tuple(service.prompt_ids(prompt))
    room = max(service.max_context - len(ids), 1)
    if asked is not None and is_lowered:
        asked = min(asked, room)
    default = DEFAULT_MAX_TOKENS["thinking" if conversation.thinking else "chat"]
    if is_whole and logprobs is not None:
        default = min(default, MAX_LOGPROBS // (num_choices * (1 + logprobs)))
    max_tokens = service.limit_tokens(asked, len(ids), default)
    guide = guide or format_guide(conversation.response_format)
    return GenerationPlan(
        prompt=prompt,
        prompt_ids=ids,
        params=sampling_params(sampling, max_tokens=max_tokens, logprobs=logprobs),
        phases=plan_phases(
            conversation,
            prompt,
            service.tokenizer,
            guide=guide,
            budget=budget,
            parallel_calls=parallel_calls,
        ),
        num_choices=num_choices,
        stops=stops,
        parallel_calls=parallel_calls,
        ignores_end=bool(sampling.ignore_eos),
        priority=sampling.priority or 0,
        cache_salt=service.salt(sampling.cache_salt),
    )


def refuse_images(conversation: Conversation) -> Conversation:
    """Refuse images; inside a tool result the prompt describes them in the model's own format."""
    for message in conversation.messages:
        if message.role != "tool" and Image.PLACEHOLDER in message.content:
            fail(message.path, "an image", "text only; this model sees no images")
    return conversation


def body_guide(body: Guided) -> Guide | None:
    """The constraint of `structured_outputs`, or of one of its older field names."""
    outputs = body.structured_outputs
    given: list[tuple[Any, Any]] = [
        ("json_schema", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("grammar", body.guided_grammar),
    ]
    if outputs is not None:
        given += [
            ("json_schema", outputs.json_schema),
            ("json_object", outputs.json_object or None),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("grammar", outputs.grammar),
        ]
    given = [(kind, value) for kind, value in given if value is not None]
    if len(given) > 1 or (outputs is not None and not given):
        expected = "one of json, json_object, regex, choice and grammar"
        fail("structured_outputs", f"{len(given)} constraints", expected)
    if not given:
        return None
    [(kind, value)] = given
    return Guide(kind, None if kind == "json_object" else value)


def format_guide(response_format: object) -> Guide | None:
    """The constraint of a response format; the encoder has checked its shape."""
    if response_format is None:
        return None
    fields = read_object(response_format, "response_format")
    kind = fields.get("type")
    if kind == "json_object":
        return Guide("json_object")
    if kind == "json_schema":
        return Guide("json_schema", dict(fields["json_schema"]["schema"]))
    if kind == "regex":
        return Guide("regex", read_text(fields.get("regex"), "response_format.regex"))
    return None


def plan_phases(
    conversation: Conversation,
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    guide: Guide | None = None,
    budget: int | None = None,
    parallel_calls: bool = True,
) -> tuple[Phase, ...]:
    """The phases of an answer; `budget` limits the reasoning tokens."""
    if guide is not None and prompt.start.continued:
        fail(
            "response_format",
            "a constraint together with a message to continue",
            "one of them; a constraint holds for a whole answer",
        )
    thinks = prompt.start.state == "reasoning"
    close = tokenizer.special.think_close
    calls = _call_grammar(conversation.tool_choice, prompt, tokenizer, parallel_calls)
    of_calls = _guide_of_calls(conversation.tool_choice, calls)
    reasoning = (Phase(guide=of_calls, until=close, limit=budget),) if thinks else ()
    if calls is not None and conversation.tool_choice.is_forced:
        return (*reasoning, _forced_call(calls, tokenizer, in_block=not thinks))
    if guide is None:
        answer = of_calls
    else:
        answer = guide if calls is None else Guide("structure", answer_or_calls(guide, calls))
    if thinks and budget is not None:
        return (*reasoning, Phase(guide=answer))
    if thinks and guide is not None and answer is not None:
        answer = replace(answer, after_id=close)
    return (Phase(guide=answer),)


def _call_grammar(
    choice: ToolChoice, prompt: Prompt, tokenizer: Tokenizer, is_parallel: bool
) -> CallGrammar | None:
    """The grammar of tool calls; None without tools."""
    tools = [tool for tool in prompt.tools if choice.allows(tool.name)]
    if not tools:
        return None
    marker_id = tokenizer.marker_id(texts.DSML)
    is_parallel = is_parallel and choice.kind != "named"
    return CallGrammar(tools, prompt.dialect, marker_id, choice.is_forced, is_parallel)


def _guide_of_calls(choice: ToolChoice, calls: CallGrammar | None) -> Guide | None:
    """The guide for optional calls: free text until one begins."""
    if calls is None:
        return None
    is_bound = choice.is_forced or choice.allowed or any(tool.is_strict for tool in calls.tools)
    if not is_bound:
        return None
    return Guide("structure", calls.after_marker(), after_id=calls.marker_id, must_come=False)


def _forced_call(calls: CallGrammar, tokenizer: Tokenizer, *, in_block: bool) -> Phase:
    """A forced call: its markup is inserted up to the part that the model decides."""
    dialect = calls.dialect
    block = "" if in_block else f"\n\n<{texts.DSML}{dialect.block_tag}>\n"
    opening = f'{block}<{texts.DSML}{dialect.invoke_tag} name="'
    if len(calls.tools) > 1:
        return Phase(_ids(opening, tokenizer), Guide("structure", calls.after_quote()))
    [tool] = calls.tools
    forced = _ids(f'{opening}{tool.name}">\n', tokenizer)
    return Phase(forced, Guide("structure", calls.after_name(tool)))


def _ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids: list[int] = []
    for piece, is_marker in split_markers(text, (texts.DSML,)):
        ids += [tokenizer.marker_id(piece)] if is_marker else tokenizer.encode(piece)
    return tuple(ids)


def read_budget(fields: Mapping[str, Any]) -> int | None:
    """The reasoning token limit, under any of the field names that clients use."""
    thinking = fields.get("thinking")
    nested = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    for path, value in (
        ("thinking_token_budget", fields.get("thinking_token_budget")),
        ("thinking_budget", fields.get("thinking_budget")),
        ("thinking.budget_tokens", nested),
    ):
        if value is not None:
            if type(value) is not int or value < 1:
                fail(path, show(value), "a whole number above 0")
            return value
    return None
