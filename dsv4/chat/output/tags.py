"""The words of the tool markup, and the types that the parser's parts exchange."""

from enum import Enum, auto
from typing import NamedTuple

from dsv4.chat import texts

TAG_OPEN = "<" + texts.DSML
TAG_CLOSE = "</" + texts.DSML
INVOKE = 'invoke name="'
PARAMETER = 'parameter name="'
IS_STRING = 'string="true"'
IS_JSON = 'string="false"'


class Delta(NamedTuple):
    """A new piece of the result. `kind`: reasoning, content, call (its name) or arguments."""

    kind: str
    text: str
    call_index: int = 0  # which call


class Outcome(Enum):
    OPEN = auto()
    CLOSED = auto()  # its closing tag arrived
    TEXT = auto()  # not a call after all: `given_back` returns to its source


def overlap(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
