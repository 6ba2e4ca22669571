"""Checked reading of single values of a request.

Every reader takes the path of the value it reads (`messages[3].content`), so that each error
names the place in the request that has to be changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dsv4.chat import jsontext
from dsv4.errors import RequestError

MAX_TEXT_CHARS = 8_000_000  # more text than the longest context holds


def fail(path: str, found: str, expected: str) -> NoReturn:
    raise RequestError(f"{path}: found {found}, expected {expected}")


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else repr(value))


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
    """Refuse what JSON cannot say, and nesting that no honest schema has."""
    if depth > jsontext.MAX_DEPTH:
        fail(path, "nested values", f"at most {jsontext.MAX_DEPTH} levels; flatten the value")
    if isinstance(value, str):
        read_text(value, path)
    elif isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                fail(path, f"the key {key!r}", "keys that are strings")
            read_text(key, path)
            check_json(member, path, depth + 1)
    elif isinstance(value, (list, tuple)):
        for member in value:
            check_json(member, path, depth + 1)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            fail(path, repr(value), "a number that JSON can write")
    elif value is not None and not isinstance(value, (bool, int)):
        fail(path, type(value).__name__, "a JSON value")
