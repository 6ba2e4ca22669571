"""JSON in the prompt format's spelling, and strict, bounded parsing of JSON from a model.

Python's parser accepts more than JSON (NaN), fails on long numbers and recurses; all three would
make the result depend on the interpreter, so they are handled here.
"""

import json
from typing import Any, NoReturn

MAX_DEPTH = 64

_WHITESPACE = " \t\n\r"


def dump(value: Any) -> str:
    """Python's default spelling with non-ASCII unescaped. ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def escape(text: str) -> str:
    """The inside of a JSON string; can be applied to any piece of a text separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def strip(text: str) -> str:
    return text.strip(_WHITESPACE)


def load(text: str) -> Any:
    """Read one JSON value. ValueError if it is not JSON or is nested deeper than MAX_DEPTH."""
    if depth_exceeds(text, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return json.loads(text, parse_constant=_refuse_constant)


def is_json(text: str) -> bool:
    try:
        # Numbers stay text: only their spelling matters, and Python limits long integers.
        json.loads(_bounded(text), parse_constant=_refuse_constant, parse_int=str, parse_float=str)
    except ValueError:
        return False
    return True


def object_keys(text: str) -> list[str] | None:
    """The keys of a JSON object, or None if the text is not a JSON object."""
    try:
        value = json.loads(
            _bounded(text), parse_constant=_refuse_constant, parse_int=str, parse_float=str
        )
    except ValueError:
        return None
    return list(value) if isinstance(value, dict) else None


def depth_exceeds(text: str, limit: int) -> bool:
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            if depth > limit:
                return True
        elif char in "]}":
            depth -= 1
    return False


def has_surrogate(text: str) -> bool:
    """Half of a surrogate pair is not a character: no tokenizer can encode it."""
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _bounded(text: str) -> str:
    if depth_exceeds(text, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
