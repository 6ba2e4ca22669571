"""Validated reading of single values of a request.

Every reader takes the path of its value (`messages[3].content`), so each error names the place in
the request to change.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dsv4.chat import jsontext
from dsv4.errors import RequestError

MAX_TEXT_CHARS = 8_000_000  # more text than the longest context holds
_MAX_INT_BITS = 8192  # Python refuses to write much longer ones
_MAX_SHOWN_CHARS = 80


def fail(path: str, found: str, expected: str) -> NoReturn:
    raise RequestError(f"{path}: found {found}, expected {expected}")


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return names.get(type(value), type(value).__name__)


def show(value: object) -> str:
    """A value for an error message: itself if short, otherwise its kind."""
    if isinstance(value, str):
        return repr(value if len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "…")
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64):
        return repr(value)
    return kind_of(value)


def read_object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        fail(path, kind_of(value), "an object")
    return value


def read_list(value: object, path: str, limit: int) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        fail(path, kind_of(value), "a list")
    if len(value) > limit:
        fail(path, f"{len(value)} entries", f"at most {limit}")
    return value


def read_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        fail(path, kind_of(value), "a string")
    if len(value) > MAX_TEXT_CHARS:
        fail(path, f"{len(value)} characters", f"at most {MAX_TEXT_CHARS}; send a shorter text")
    if jsontext.has_surrogate(value):
        fail(path, "half of a surrogate pair", "whole Unicode characters; send valid UTF-8")
    return value


def read_optional_text(value: object, path: str) -> str:
    return "" if value is None else read_text(value, path)


def read_flag(value: object, path: str) -> bool:
    if value is not None and not isinstance(value, bool):
        fail(path, kind_of(value), "true or false")
    return bool(value)


def check_json(value: object, path: str, depth: int = 0) -> None:
    """Refuse what JSON cannot express, and absurdly deep nesting."""
    if depth > jsontext.MAX_DEPTH:
        fail(path, "nested values", f"at most {jsontext.MAX_DEPTH} levels; flatten the value")
    if isinstance(value, str):
        read_text(value, path)
    elif isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                fail(path, f"the key {show(key)}", "keys that are strings")
            read_text(key, path)
            check_json(member, path, depth + 1)
    elif isinstance(value, (list, tuple)):
        for member in value:
            check_json(member, path, depth + 1)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            fail(path, show(value), "a number that JSON can write")
    elif isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        fail(path, "a number of thousands of digits", "a shorter one")
    elif value is not None and not isinstance(value, (bool, int)):
        fail(path, type(value).__name__, "a JSON value")
