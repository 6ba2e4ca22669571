"""Random requests and outputs, from a seed: inputs of the differential tests and the fuzzer."""

import json
import random
from typing import Any

from dsv4.chat import Dialect
from dsv4.chat import texts as fixed

WORDS = [
    "hello", "Rome", "naïve", "日本語", "🤭", "a\nb", "\n", "\n\n", " ", "  two  ", '"', "\\",
    "<", "</", "<b>", ">", "{", "}", "[1, 2]", "\t", "\x00", "\u200d", "json", "e\u0301",
    fixed.THINK_OPEN, fixed.THINK_CLOSE, fixed.USER, fixed.ASSISTANT, fixed.EOS, fixed.BOS,
    fixed.DSML, fixed.SYSTEM, fixed.LATEST_REMINDER, fixed.GROUNDING[6], fixed.GROUNDING[7],
    "<｜DSML｜tool_calls>", "</｜DSML｜ invoke>", "<tool_result>", fixed.IMAGE_V41,
]  # fmt: skip
NAMES = ["get_weather", "run", "ping", "f-1", "calc"]
EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


class RequestMaker:
    """Requests that the publisher's library accepts and renders as we do.

    Left out, because the two are known to differ there (each has a test of its own): calls
    without parameters, small floats and empty user text in V4, integers beyond 64 bits, twice
    encoded arguments in V4.1, and a last assistant turn without continuation when thinking.
    """

    def __init__(self, rng: random.Random, dialect: Dialect) -> None:
        self.rng = rng
        self.dialect = dialect
        self.num_calls = 0

    def text(self, *, may_be_empty: bool = False) -> str:
        least = 0 if may_be_empty else 1
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(least, 5)))

    def content(self, kinds: tuple[str, str] = ("text", "text")) -> Any:
        if self.rng.random() < 0.75:
            return self.text()
        return [
            {"type": self.rng.choice(kinds), "text": self.text()}
            for _ in range(self.rng.randint(1, 3))
        ]

    def json_value(self, depth: int = 0) -> Any:
        kind = self.rng.randint(0, 5 if depth > 2 else 7)
        if kind == 0:
            return self.text(may_be_empty=True)
        if kind == 1:
            return self.rng.choice([0, 1, -7, 2**40, -(2**62)])
        if kind == 2:
            return self.rng.choice([1.5, -0.25, 1e22, 100.0, 3.14159])
        if kind <= 5:
            return self.rng.choice([True, False, None])
        if kind == 6:
            return [self.json_value(depth + 1) for _ in range(self.rng.randint(0, 3))]
        return {self.text(): self.json_value(depth + 1) for _ in range(self.rng.randint(0, 3))}

    def arguments(self) -> dict[str, Any]:
        least = 0 if self.dialect.is_v41 else 1
        return {
            self.rng.choice(["city", "n", "日", "a b", "x_1", "opts"]): self.json_value()
            for _ in range(self.rng.randint(least, 3))
        }

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {
                self.text(): {"type": "string", "description": self.text(), "default": 1.5}
                for _ in range(self.rng.randint(0, 3))
            },
        }

    def tool_names(self) -> list[str]:
        return self.rng.sample(NAMES, self.rng.randint(0, 3))

    def call_id(self, place: int) -> str:
        self.num_calls += 1
        return f"call_{place:02d}_{self.num_calls}"

    def history(self) -> list[tuple[str, Any]]:
        """Abstract turns that each request shape writes in its own way."""
        turns: list[tuple[str, Any]] = []
        for _ in range(self.rng.randint(1, 6)):
            kind = self.rng.choice(["user", "user", "assistant", "calls", "system"])
            if kind == "user":
                turns.append(("user", self.content()))
            elif kind == "system":
                turns.append(("system", self.text()))
            elif kind == "assistant":
                turns.append(("assistant", (self.text(), self.reasoning(), [])))
            else:
                calls = [
                    (self.call_id(place), self.rng.choice(NAMES), self.arguments())
                    for place in range(self.rng.randint(1, 3))
                ]
                text = self.text(may_be_empty=True)
                turns.append(("assistant", (text, self.reasoning(), calls)))
                results = [(call_id, self.text()) for call_id, _, _ in calls]
                self.rng.shuffle(results)
                turns.append(("results", results))
        # V4 moves system messages to the front, so what counts is the last other turn.
        others = [kind for kind, _ in turns if kind != "system"]
        if others and others[-1] == "assistant":
            turns.append(("user", self.content()))
        return turns

    def reasoning(self) -> str | None:
        return self.rng.choice([None, self.text()])

    def options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["thinking"] = {"type": rng.choice(["enabled", "disabled", "adaptive"])}
        if rng.random() < 0.5:
            options["reasoning_effort"] = rng.choice(EFFORTS)
        return options

    def thinks(self, options: dict[str, Any]) -> bool:
        if "thinking" in options:
            return bool(options["thinking"]["type"] != "disabled")
        return options.get("reasoning_effort") != "none"

    def chat(self) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = self.options()
        messages: list[dict[str, Any]] = []
        for kind, value in self.history():
            if kind == "results":
                messages += [
                    {"role": "tool", "tool_call_id": call_id, "content": text}
                    for call_id, text in value
                ]
            elif kind == "assistant":
                messages.append(_chat_assistant(*value))
            else:
                messages.append({"role": kind, "content": value})
        if rng.random() < 0.2:
            messages.insert(
                rng.choice([0, len(messages)]), {"role": "latest_reminder", "content": self.text()}
            )
        names = self.tool_names()
        if names:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "description": self.text(),
                        "parameters": self.schema(),
                    },
                }
                for name in names
            ]
            choices: list[Any] = ["auto", "none"]
            if not self.thinks(body):
                choices += ["required", {"type": "function", "function": {"name": names[0]}}]
            body["tool_choice"] = rng.choice(choices)
        elif messages[-1]["role"] == "user" and rng.random() < 0.2:
            reasoning = self.reasoning() if self.thinks(body) else None
            prefix = _chat_assistant(self.text(may_be_empty=True), reasoning, [])
            if not any(m["role"] == "tool" for m in messages):
                messages.append({**prefix, "prefix": True})
        if rng.random() < 0.2 and not messages[-1].get("prefix"):
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": self.schema()},
            }
        return {**body, "messages": messages}

    def messages(self) -> dict[str, Any]:
        body: dict[str, Any] = {}
        options = self.options()
        if "thinking" in options:
            body["thinking"] = options["thinking"]
        if options.get("reasoning_effort") in ("low", "medium", "high", "xhigh", "max"):
            body["output_config"] = {"effort": options["reasoning_effort"]}
        if self.rng.random() < 0.5:
            body["system"] = self.content()
        messages: list[dict[str, Any]] = []
        for kind, value in self.history():
            if kind == "results":
                parts: list[dict[str, Any]] = [
                    {"type": "tool_result", "tool_use_id": call_id, "content": text}
                    for call_id, text in value
                ]
                if self.rng.random() < 0.3:
                    parts.append({"type": "text", "text": self.text()})
                messages.append({"role": "user", "content": parts})
            elif kind == "assistant":
                messages.append({"role": "assistant", "content": _message_parts(*value)})
            else:
                messages.append({"role": kind, "content": value})
        names = self.tool_names()
        if names:
            body["tools"] = [
                {"name": name, "description": self.text(), "input_schema": self.schema()}
                for name in names
            ]
            choices = [{"type": "auto"}, {"type": "none"}]
            if body.get("thinking", {}).get("type") == "disabled":
                choices.append({"type": "tool", "name": names[0]})
            body["tool_choice"] = self.rng.choice(choices)
        return {**body, "messages": messages}

    def responses(self) -> dict[str, Any]:
        body: dict[str, Any] = {}
        effort = self.options().get("reasoning_effort")
        if effort:
            body["reasoning"] = {"effort": effort}
        if self.rng.random() < 0.5:
            body["instructions"] = self.text()
        items: list[dict[str, Any]] = []
        for kind, value in self.history():
            if kind == "results":
                items += [
                    {"type": "function_call_output", "call_id": call_id, "output": text}
                    for call_id, text in value
                ]
            elif kind == "assistant":
                items += _response_items(*value)
            else:
                kinds = ("input_text", "input_text")
                items.append({"role": kind, "content": self.content(kinds)})
        names = self.tool_names()
        if names:
            body["tools"] = [
                {
                    "type": "function",
                    "name": name,
                    "description": self.text(),
                    "parameters": self.schema(),
                }
                for name in names
            ]
            choices: list[Any] = ["auto", "none"]
            if effort == "none":
                choices += ["required", {"type": "function", "name": names[0]}]
            body["tool_choice"] = self.rng.choice(choices)
        return {**body, "input": items}


def _chat_assistant(text: str, reasoning: str | None, calls: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for call_id, name, arguments in calls
        ]
    return message


def _message_parts(text: str, reasoning: str | None, calls: list[Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reasoning is not None:
        parts.append({"type": "thinking", "thinking": reasoning, "signature": "s"})
    if text:
        parts.append({"type": "text", "text": text})
    parts += [
        {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        for call_id, name, arguments in calls
    ]
    return parts


def _response_items(text: str, reasoning: str | None, calls: list[Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reasoning is not None:
        items.append(
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reasoning}],
            }
        )
    if text:
        items.append({"role": "assistant", "content": [{"type": "output_text", "text": text}]})
    items += [
        {
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": json.dumps(arguments),
        }
        for call_id, name, arguments in calls
    ]
    return items


PLAIN_WORDS = [
    "hello", "Rome", "naïve", "日本語", "🤭", "a\nb", "\n", "\n\n", " ", '"', "\\", "<", "</",
    "<b>", ">", "{", "}", "[1, 2]", "\t", "<thin", "</thinking>", "｜", "<｜", "DSML", "<｜x",
    "e\u0301", "invoke name=", "string", "/>", "tool_calls",
]  # fmt: skip
VALUE_WORDS = [*PLAIN_WORDS, fixed.THINK_OPEN, fixed.THINK_CLOSE, "<｜DSML｜", "\x01", "\u2028"]
FALSE_STARTS = ("<", "</", "<thin", "｜", "｜DSML")
JSON_VALUES = ["1", "-2.5", "true", "null", "[]", "{}", '["a", {"k": [1]}]', '{"x":"é\\n"}', '"s"']


class OutputMaker:
    """Outputs as the model writes them, and with the faults that the library repairs too.

    Left out, because the two are known to differ there (each has a test of its own): a false
    start of a marker directly before newlines and a marker, an opening thinking marker in the
    answer, and an end of output inside a call.
    """

    def __init__(self, rng: random.Random, dialect: Dialect, *, tools_active: bool = True) -> None:
        self.rng = rng
        self.dialect = dialect
        self.value_words = VALUE_WORDS if tools_active else PLAIN_WORDS

    def prose(self) -> str:
        text = "".join(self.rng.choice(PLAIN_WORDS) for _ in range(self.rng.randint(0, 6)))
        return text + "." if text.rstrip("\n").endswith(FALSE_STARTS) else text

    def value(self) -> tuple[str, str]:
        """(text, string attribute) of a parameter."""
        if self.rng.random() < 0.4:
            return self.rng.choice(JSON_VALUES), "false"
        words = [self.rng.choice(self.value_words) for _ in range(self.rng.randint(0, 6))]
        text = "".join(words)
        # `</` directly before the closing tag, or before a mention of the marker, would end it.
        return text.replace("</<｜DSML｜", "<｜DSML｜").replace("</｜DSML｜", ""), "true"

    def call(self, *, is_closed: bool = True) -> str:
        dialect = self.dialect
        name = self.rng.choice(NAMES)
        lines = [f'<｜DSML｜{dialect.invoke_tag} name="{name}">']
        for key in self.rng.sample(["city", "n", "opts", "日", "x_1"], self.rng.randint(0, 3)):
            text, flag = self.value()
            lines.append(
                f'<｜DSML｜{dialect.parameter_tag} name="{key}" string="{flag}">{text}'
                f"</｜DSML｜{dialect.parameter_tag}>"
            )
        if is_closed:
            lines.append(f"</｜DSML｜{dialect.invoke_tag}>")
        return "\n".join(lines)

    def block(self) -> str:
        tag = self.rng.choice([self.dialect.block_tag] * 4 + ["function_calls", "toolcalls"])
        calls = [self.call() for _ in range(self.rng.randint(1, 3))]
        is_last_closed = self.rng.random() < 0.9
        if not is_last_closed:
            calls[-1] = self.call(is_closed=False)
        text = "\n".join([f"<｜DSML｜{tag}>", *calls])
        if not is_last_closed or self.rng.random() < 0.9:
            text += f"\n</｜DSML｜{tag}>"
            if self.rng.random() < 0.1:
                text += self.prose()
        return text

    def output(self, *, thinking: bool) -> str:
        text = ""
        if thinking:
            text = self.rng.choice(["", "\n"]) + self.prose()
            if self.rng.random() < 0.85:
                text += self.rng.choice(["", "\n"]) + fixed.THINK_CLOSE
        text += self.rng.choice(["", "", "\n\n"]) + self.prose()
        if self.rng.random() < 0.6:
            text += self.rng.choice(["\n\n", "\n\n", "", "\n"]) + self.block()
        return text
