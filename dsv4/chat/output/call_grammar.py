"""The markup of tool calls as a grammar: declared names, arguments that keep to their schemas.

A format is a JSON object in the grammar library's structural tag notation. The marker in a tag is
matched only by its token: the same characters spelled with other tokens are text to the parser.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.chat.dialect import Dialect
from dsv4.chat.messages import Tool
from dsv4.request import Guide

TagFormat = dict[str, Any]

_MAX_REFERENCES = 16  # followed on the way to one value
_NOT_STRING = {"type": ["number", "boolean", "null", "array", "object"]}
_ANY_TEXT = {"type": "regex", "pattern": r"[\s\S]*"}
_BESIDE_BRANCHES = {"type", "properties", "enum", "const", "items"}
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties")


def answer_format(guide: Guide) -> TagFormat:
    """A guide's constraint, as a part of a larger format."""
    if guide.kind == "choice":
        return _or([_text(choice) for choice in guide.value])
    if guide.kind == "regex":
        return {"type": "regex", "pattern": guide.value}
    if guide.kind == "grammar":
        return {"type": "grammar", "grammar": guide.value}
    if guide.kind == "json_object":
        return _json({"type": "object", "additionalProperties": True})
    return _json(json.loads(guide.text))


def answer_or_calls(guide: Guide, calls: "CallGrammar") -> TagFormat:
    return _or([answer_format(guide), calls.block()])


@dataclass(frozen=True)
class CallGrammar:
    """`tools`: those that may be called; with `is_strict` the arguments of all tools follow their
    schemas, otherwise only those of strict tools."""

    tools: Sequence[Tool]
    dialect: Dialect
    marker_id: int
    is_strict: bool
    is_parallel: bool

    def block(self) -> TagFormat:
        """A whole block of calls."""
        return _sequence(_text("\n\n<"), self._marker, self.after_marker())

    def after_marker(self) -> TagFormat:
        """A block after its first marker."""
        opening = _text(f"{self.dialect.block_tag}>\n<")
        return _sequence(opening, self._marker, self._invoke, self.after_quote())

    def after_quote(self) -> TagFormat:
        """A block from its first call's name onwards."""
        calls = [_or([self._call(tool) for tool in self.tools])]
        if self.is_parallel:
            further = _sequence(_text("\n<"), self._marker, self._invoke, *calls)
            calls.append({"type": "star", "content": further})
        return _sequence(*calls, self._end())

    def after_name(self, tool: Tool) -> TagFormat:
        """The rest of a block after its first call's name."""
        parts = [self._parameters(tool), *self._close(f"{self.dialect.invoke_tag}>")]
        if self.is_parallel:
            further = _sequence(_text("\n<"), self._marker, self._invoke, self._call(tool))
            parts.append({"type": "star", "content": further})
        return _sequence(*parts, self._end())

    @property
    def _marker(self) -> TagFormat:
        return {"type": "token", "token": self.marker_id}

    @property
    def _invoke(self) -> TagFormat:
        return _text(f'{self.dialect.invoke_tag} name="')

    def _call(self, tool: Tool) -> TagFormat:
        name = _text(f'{tool.name}">\n')
        return _sequence(name, self._parameters(tool), *self._close(f"{self.dialect.invoke_tag}>"))

    def _end(self) -> TagFormat:
        return _sequence(_text("\n"), *self._close(f"{self.dialect.block_tag}>"))

    def _close(self, rest: str) -> list[TagFormat]:
        return [_text("</"), self._marker, _text(rest)]

    # Arguments.

    def _parameters(self, tool: Tool) -> TagFormat:
        root = tool.schema.get("parameters")
        if not (self.is_strict or tool.is_strict) or not isinstance(root, Mapping) or not root:
            return self._any_parameters()
        if not _is_plain(root):
            return _sequence(_json(root), _text("\n"))  # the parser also accepts a whole object
        properties, required = root.get("properties", {}), root.get("required", ())
        parts = []
        for name, schema in properties.items():
            part = self._parameter(name, schema, root)
            parts.append(part if name in required else {"type": "optional", "content": part})
        if root.get("additionalProperties", "properties" not in root) is not False:
            parts.append(self._any_parameters())
        if any(name in required for name in properties):
            return _sequence(*parts)
        return _or([_text("\n"), *([_sequence(*parts)] if parts else [])])

    def _parameter(self, name: str, schema: Any, root: Mapping[str, Any]) -> TagFormat:
        forms = [
            _sequence(_text(f'{name}" string="{flag}">'), value)
            for flag, value in _values(schema, root)
        ]
        return self._wrapped(_or(forms))

    def _any_parameters(self) -> TagFormat:
        name = {"type": "regex", "pattern": r'[^"<>\n]+'}
        forms = [
            _sequence(_text('" string="true">'), _ANY_TEXT),
            _sequence(_text('" string="false">'), _json(_NOT_STRING)),
        ]
        return {"type": "star", "content": self._wrapped(_sequence(name, _or(forms)))}

    def _wrapped(self, body: TagFormat) -> TagFormat:
        tag = self.dialect.parameter_tag
        return _sequence(
            _text("<"), self._marker, _text(f'{tag} name="'), body, *self._close(f"{tag}>\n")
        )


def _is_plain(root: Mapping[str, Any]) -> bool:
    """Whether a schema is an object with properties whose names can stand in a tag."""
    properties, required = root.get("properties", {}), root.get("required", [])
    return (
        root.get("type", "object") == "object"
        and not any(word in root for word in _WHOLE)
        and isinstance(properties, Mapping)
        and not any(char in name for name in properties for char in '"<>\n')
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[tuple[str, TagFormat]]:
    """The ways to write a value: whether as a string's own text ("true") or as JSON, and how."""
    if not isinstance(schema, Mapping) or not schema:
        return [("true", _ANY_TEXT), ("false", _json(_NOT_STRING))]
    if depth < _MAX_REFERENCES:
        target = _target(schema, root)
        if target is not None:
            return _values(target, root, depth + 1)
        for word in ("anyOf", "oneOf"):
            branches = schema.get(word)
            if isinstance(branches, list) and not schema.keys() & _BESIDE_BRANCHES:
                return [v for branch in branches for v in _values(branch, root, depth + 1)]
    whole = {**schema, **{word: root[word] for word in ("$defs", "definitions") if word in root}}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        texts = [value for value in listed if isinstance(value, str)]
        others = [value for value in listed if not isinstance(value, str)]
        found = [("true", _or([_text(value) for value in texts]))] if texts else []
        return found + ([("false", _json({"enum": others}))] if others else [])
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "string" not in types or "format" in schema:
        return [("false", _json(whole))]  # as JSON, where the library knows formats
    others = [kind for kind in types if kind != "string"]
    found = [("true", _string(schema))]
    return found + ([("false", _json({**whole, "type": others}))] if others else [])


def _target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The target of a schema's reference; None if it cannot be resolved here."""
    reference = schema.get("$ref")
    parts = reference.split("/") if isinstance(reference, str) else []
    if len(parts) != 3 or parts[:2] not in (["#", "$defs"], ["#", "definitions"]):
        return None
    found = root.get(parts[1])
    return found.get(parts[2]) if isinstance(found, Mapping) else None


def _string(schema: Mapping[str, Any]) -> TagFormat:
    if "pattern" in schema:
        return {"type": "regex", "pattern": schema["pattern"]}
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return {"type": "regex", "pattern": rf"[\s\S]{{{least},{most}}}"}


def _text(value: str) -> TagFormat:
    return {"type": "const_string", "value": value}


def _json(schema: Any) -> TagFormat:
    return {"type": "json_schema", "json_schema": schema}


def _sequence(*elements: TagFormat) -> TagFormat:
    return {"type": "sequence", "elements": list(elements)}


def _or(elements: list[TagFormat]) -> TagFormat:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
