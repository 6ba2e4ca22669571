"""Whether to think, and how hard: the same rules for every request shape."""

from typing import Any

from dsv4.chat.dialect import Dialect
from dsv4.chat.fields import fail, kind_of, read_object, show
from dsv4.errors import RequestError


def read_switch(value: object, path: str) -> bool | None:
    """An explicit on/off setting, or None."""
    if value is None:
        return None
    kind = read_object(value, path).get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        fail(f"{path}.type", show(kind), "enabled, disabled or adaptive")
    return bool(kind != "disabled")


def read_effort(value: object, path: str, dialect: Dialect) -> str | int | None:
    """A name, or for V4.1 a number; checked against the dialect."""
    if value is None or isinstance(value, (str, int)):
        try:
            dialect.effort_text(value)
        except RequestError as error:
            raise RequestError(f"{path}: {str(error).partition(': ')[2]}") from None
        return value
    fail(path, kind_of(value), "the name of an effort")


def decide(switch: bool | None, effort: str | int | None) -> dict[str, Any]:
    """The fields of a Conversation: an explicit switch overrides any effort, even `none`."""
    return {"thinking": effort != "none" if switch is None else switch, "effort": effort}
