"""Inside a block of tool calls: a state machine over text and tags.

The parser passes text, openings (`<` + DSML) and closings (`</` + DSML), and learns when the block
has ended. No text is examined twice except the few characters that may start a tag's name.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto

from dsv4.chat.output.arguments import ArgumentsWriter
from dsv4.chat.output.tags import (
    INVOKE,
    IS_JSON,
    IS_STRING,
    PARAMETER,
    TAG_CLOSE,
    TAG_OPEN,
    Delta,
    Outcome,
    overlap,
)

_MAX_BARE_CHARS = 512  # an unfinished tag longer than this is plain text


class _State(Enum):
    TAG = auto()  # after an opening, before its name is known
    PROSE = auto()  # between tags
    NAME = auto()  # a call's name, up to the quote
    INVOKE_REST = auto()  # up to >
    KEY = auto()
    PARAMETER_REST = auto()
    VALUE = auto()
    BODY = auto()  # a JSON object instead of parameters
    CLOSER = auto()  # a closing tag, up to >


class CallBlock:
    """`before` is the text returned with the block if it turns out not to be one."""

    def __init__(
        self,
        tools: Mapping[str, frozenset[str]],
        *,
        first_index: int,
        before: str = "",
        already_open: bool = False,
    ) -> None:
        self._tools = tools
        self._first_index = first_index
        self._num_calls = 0
        self._call: ArgumentsWriter | None = None
        self._call_name = ""
        self._key = ""
        self._may_have_body = False  # directly after a call's opening tag
        self._has_body = False
        self._state = _State.PROSE if already_open else _State.TAG
        # An unwrapped call is buffered until it closes; None: the first tag is not known yet.
        self._provisional: bool | None = False if already_open else None
        self._raw: list[str] | None = [] if already_open else [before, TAG_OPEN]
        self._tag_at = 1  # where in _raw the tag in question begins
        self._parts: list[str] = []
        self._tail = ""
        self._in_tag = False
        self._tag_parts: list[str] = []
        self._num_tags = 0
        self._prose: list[str] = []
        self._deltas: list[Delta] = []
        self._handlers: dict[_State, Callable[[str], str]] = {
            _State.TAG: self._in_tag_name,
            _State.PROSE: self._in_prose,
            _State.NAME: self._in_name,
            _State.INVOKE_REST: self._in_invoke_rest,
            _State.KEY: self._in_key,
            _State.PARAMETER_REST: self._in_parameter_rest,
            _State.VALUE: self._in_value,
            _State.BODY: self._in_body,
            _State.CLOSER: self._in_closer,
        }
        self.outcome = Outcome.OPEN
        self.given_back = ""
        self.rest: str | None = None  # set with TEXT: a new opening whose text follows

    @property
    def num_calls(self) -> int:
        return 0 if self._provisional else self._num_calls

    @property
    def skipped(self) -> str:
        """Text inside the block outside any call."""
        return "".join(self._prose)

    def take_deltas(self) -> list[Delta]:
        if self._provisional:
            return []
        deltas, self._deltas = self._deltas, []
        return deltas

    def push(self, text: str) -> str:
        """Consume text; returns the part after the block's end."""
        if self._raw is not None:
            self._raw.append(text)
        while text and self.outcome is Outcome.OPEN:
            text = self._handlers[self._state](text)
        if self.outcome is Outcome.TEXT and self.rest is None:
            self._give_back(len(text))
        return text

    def open(self) -> bool:
        """Consume an opening. False: the block ended just before it, and it was not consumed."""
        return self._take_tag(TAG_OPEN, _State.TAG)

    def close(self) -> bool:
        return self._take_tag(TAG_CLOSE, _State.CLOSER)

    def retract(self) -> bool:
        """A thinking marker between tags: without a call so far, the markup was only quoted."""
        is_between_tags = self._state in (_State.TAG, _State.PROSE, _State.CLOSER)
        if not is_between_tags or self.num_calls:
            return False
        self._give_back(0)
        return True

    def finish(self, held: str = "", *, cut: bool) -> None:
        """The output ended inside the block; `cut` if by the length limit.

        `held` might have become a tag. Between tags it is an unfinished one, elsewhere text.
        """
        if held and self._state is _State.PROSE:
            self._end_state()
            self._tail, self._in_tag, self._may_have_body = "", True, False
            self._raw = None if self._raw is None else [*self._raw, held]
        elif held:
            self.push(held)
        if self._provisional:
            self._give_back(0)
        elif self._call is not None:
            if not cut:
                self._end_state()
                self._call.finish()
            elif self._state is _State.BODY:
                self._call.cut_body("".join(self._parts))
            else:
                self._call.cut()
        elif not self._num_calls and not self._is_bare_markup(cut=cut):
            self._give_back(0)
        elif not cut:
            self._end_state()

    # States: each consumes text and returns the rest for the next state.

    def _in_tag_name(self, text: str) -> str:
        self._tail = (self._tail + text).lstrip(" ")
        name = self._tail
        if any(word.startswith(name) and word != name for word in (INVOKE, PARAMETER)):
            return ""
        rest_at = 0
        if name.startswith(INVOKE):
            self._next_call_tag(is_invoke=True)
            self._state, rest_at = _State.NAME, len(INVOKE)
        elif name.startswith(PARAMETER) and self._call is not None:
            self._state, rest_at = _State.KEY, len(PARAMETER)
        else:
            self._next_call_tag(is_invoke=False)
            self._state, self._in_tag = _State.PROSE, True
        self._tail = ""
        self._parts = []
        return name[rest_at:] if self.outcome is Outcome.OPEN else ""

    def _next_call_tag(self, *, is_invoke: bool) -> None:
        if self._provisional is None:
            self._provisional = is_invoke
        elif self._provisional:
            # The unwrapped call before this tag was not closed. With clean parameters it is a
            # call; with prose in it, the markup was only quoted.
            if self._call_name in self._tools and not self.skipped.strip():
                self._end_call()
            else:
                assert self._raw is not None
                self.outcome = Outcome.TEXT
                self.given_back = "".join(self._raw[: self._tag_at])
                self.rest = "".join(self._raw[self._tag_at + 1 :])

    def _in_prose(self, text: str) -> str:
        if self._may_have_body and not self._in_tag:
            text = text.lstrip()
            if text:
                self._may_have_body = False
            if text.startswith("{"):
                self._state, self._parts = _State.BODY, []
                return text
        text = self._tail + text
        self._tail = ""
        tag_end = text.find(">") if self._in_tag else -1
        end = len(text) if tag_end < 0 else tag_end
        # A call may have lost its opening; but in an unwrapped one, prose is prose.
        found = -1 if self._provisional else text.find(INVOKE, 0, end)
        if found >= 0:
            self._skip(text[:found])
            self._leave_tag()
            self._state, self._parts = _State.NAME, []
            return text[found + len(INVOKE) :]
        if tag_end >= 0:
            self._skip(text[:tag_end])
            self._leave_tag()
            self._num_tags += 1
            return text[tag_end + 1 :]
        keep = len(text) - overlap(text, INVOKE)
        self._skip(text[:keep])
        self._tail = text[keep:]
        return ""

    def _skip(self, text: str) -> None:
        (self._tag_parts if self._in_tag else self._prose).append(text)

    def _leave_tag(self) -> None:
        """The end of a tag that opens no call. Only a block's bare name is markup."""
        if self._in_tag:
            self._keep_words("".join(self._tag_parts))
        self._in_tag, self._tag_parts = False, []

    def _keep_words(self, tag: str) -> None:
        """Keep a tag's text beside its name, so no output is lost."""
        if len(tag.split(maxsplit=1)) > 1:
            self._prose.append(tag)

    def _in_name(self, text: str) -> str:
        name, rest = self._until('"', text)
        if name is None:
            return ""
        if self._call is not None:
            self._end_call()
        if not name.strip():
            self._state, self._in_tag = _State.PROSE, True
            self._tag_parts = [f'{INVOKE}{name}" ']
            return rest
        self._call_name, self._has_body, self._may_have_body = name, False, False
        index = self._first_index + self._num_calls
        self._num_calls += 1
        self._deltas.append(Delta("call", name, index))
        self._call = ArgumentsWriter(
            self._tools.get(name),
            lambda piece: self._deltas.append(Delta("arguments", piece, index)),
        )
        if not self._provisional:
            self._raw = None
        self._state = _State.INVOKE_REST
        return rest

    def _in_invoke_rest(self, text: str) -> str:
        attributes, rest = self._until(">", text)
        if attributes is None:
            return ""
        self._state, self._in_tag, self._tail = _State.PROSE, False, ""
        self._prose.append(attributes.strip(" /"))
        if attributes.rstrip().endswith("/"):
            self._end_call()
        else:
            self._may_have_body = True
        return rest

    def _in_key(self, text: str) -> str:
        key, rest = self._until('"', text)
        if key is None:
            return ""
        self._key = key
        self._state = _State.PARAMETER_REST
        return rest

    def _in_parameter_rest(self, text: str) -> str:
        attributes, rest = self._until(">", text)
        if attributes is None:
            return ""
        self._state = _State.VALUE
        self._prose.append(attributes.replace(IS_STRING, "").replace(IS_JSON, ""))
        assert self._call is not None
        if not self._has_body:
            self._call.open_parameter(self._key, is_json=IS_JSON in attributes)
        return rest

    def _in_value(self, text: str) -> str:
        assert self._call is not None
        if self._has_body:
            self._prose.append(text)  # a body came first, and parameters after it do not count
        else:
            self._call.text(text)
        return ""

    def _in_body(self, text: str) -> str:
        self._parts.append(text)
        return ""

    def _in_closer(self, text: str) -> str:
        name, rest = self._until(">", text)
        if name is None:
            return ""
        self._close_named(name)
        return rest

    # Shared by the states.

    def _until(self, end: str, text: str) -> tuple[str | None, str]:
        """Collect up to `end`: (all that was collected, rest), or (None, "") to wait."""
        found = text.find(end)
        if found < 0:
            self._parts.append(text)
            return None, ""
        collected = "".join([*self._parts, text[:found]])
        self._parts = []
        return collected, text[found + 1 :]

    def _take_tag(self, spelling: str, state: _State) -> bool:
        if self._state in (_State.NAME, _State.KEY) or (
            self._state is _State.VALUE and state is _State.TAG
        ):
            self.push(spelling)  # inside quotes, or an opening inside a value: text
            return True
        if self._state is _State.CLOSER:
            self._close_named("".join(self._parts))  # its > is missing
            if self.outcome is not Outcome.OPEN:
                if self.outcome is Outcome.TEXT:
                    self._give_back(0)
                return False
        self._end_state()
        if self._raw is not None:
            self._tag_at = len(self._raw)
            self._raw.append(spelling)
        self._state, self._parts, self._tail = state, [], ""
        self._in_tag = self._may_have_body = False
        return True

    def _end_state(self) -> None:
        """A tag, or the end of the output, interrupts the current state."""
        if self._state is _State.PROSE:
            self._skip(self._tail)
            self._leave_tag()
        elif self._state in (_State.NAME, _State.KEY, _State.INVOKE_REST, _State.CLOSER):
            self._prose += self._parts  # it never ended
        elif self._state is _State.BODY:
            assert self._call is not None
            self._call.body("".join(self._parts))
            self._has_body = True
        elif self._state is _State.VALUE and not self._has_body:
            assert self._call is not None
            self._call.close_parameter()
        elif self._state is _State.PARAMETER_REST:
            self._prose += [self._key, *self._parts]  # a tag that never ended

    def _close_named(self, name: str) -> None:
        self._keep_words(name)
        name = name.strip()
        self._state, self._parts, self._tail = _State.PROSE, [], ""
        self._num_tags += 1
        if name.startswith("param"):
            return
        if self._call is not None:
            self._end_call()
        if not name.startswith("invoke") and self.outcome is Outcome.OPEN:
            self.outcome = Outcome.CLOSED

    def _end_call(self) -> None:
        assert self._call is not None
        self._call.finish()
        self._call = None
        if self._provisional:
            if self._call_name in self._tools:
                self._provisional = False
                self._raw = None
            else:
                self.outcome = Outcome.TEXT

    def _give_back(self, num_rest: int) -> None:
        raw = "".join(self._raw or [])
        self.outcome = Outcome.TEXT
        self.given_back = raw[: len(raw) - num_rest]
        self._prose = []

    def _is_bare_markup(self, *, cut: bool) -> bool:
        """Whether only the beginning of a call has arrived so far."""
        in_unfinished_tag = self._in_tag or self._state is not _State.PROSE
        prose = self.skipped + ("" if in_unfinished_tag else self._tail)
        if prose.strip() or sum(map(len, self._raw or [])) > _MAX_BARE_CHARS:
            return False
        return in_unfinished_tag or (cut and self._num_tags <= 1)
