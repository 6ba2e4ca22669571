"""Writes a call's arguments as JSON text while its parameters arrive."""

from collections.abc import Callable

from dsv4.chat import jsontext

# Names under which models sometimes wrap all arguments in one extra object.
_WRAPPERS = ("arguments", "input")


class ArgumentsWriter:
    """String values are streamed, escaped; other values are emitted when complete.

    `properties` are the names in the tool's schema, None for an unknown tool.
    """

    def __init__(self, properties: frozenset[str] | None, emit: Callable[[str], None]) -> None:
        self._properties = properties
        self._emit = emit
        self._num_written = 0
        self._is_whole = False  # a JSON body or an unwrapped object was written as it stood
        self._name: str | None = None  # the open parameter's
        self._is_json = False
        self._is_wrapper = False
        self._buffered: list[str] = []
        self._wrapper: tuple[str, str, bool] | None = None  # complete: name, text, is_json

    def open_parameter(self, name: str, *, is_json: bool) -> None:
        self._release_wrapper()
        self._name, self._is_json, self._buffered = name, is_json, []
        self._is_wrapper = (
            self._num_written == 0
            and name in _WRAPPERS
            and self._properties is not None
            and name not in self._properties
        )
        if not (is_json or self._is_wrapper):
            self._write_name(name)
            self._emit('"')

    def text(self, text: str) -> None:
        if self._is_json or self._is_wrapper:
            self._buffered.append(text)
        else:
            self._emit(jsontext.escape(text))

    def close_parameter(self) -> None:
        assert self._name is not None
        name, self._name = self._name, None
        if self._is_wrapper:
            self._wrapper = (name, "".join(self._buffered), self._is_json)
        elif self._is_json:
            self._write(name, "".join(self._buffered), is_json=True)
        else:
            self._emit('"')

    def body(self, text: str) -> None:
        """A JSON object instead of parameters."""
        text = jsontext.strip(text)
        self._is_whole = True
        if jsontext.object_keys(text) is None:
            text = f'{{"arguments": "{jsontext.escape(text)}"}}'
        self._emit(text)

    def finish(self) -> None:
        """Close whatever is open, to make the text valid JSON."""
        if self._name is not None:
            self.close_parameter()
        if self._is_whole or self._unwrap():
            return
        self._release_wrapper()
        self._emit("}" if self._num_written else "{}")

    def cut(self) -> None:
        """Emit what is buffered; the JSON text stays open."""
        self._release_wrapper()
        if self._name is None or not (self._is_json or self._is_wrapper):
            return
        text = "".join(self._buffered)
        self._write_name(self._name)
        self._emit(text.lstrip() if self._is_json else '"' + jsontext.escape(text))

    def cut_body(self, text: str) -> None:
        self._emit(text.lstrip())

    def _write(self, name: str, text: str, *, is_json: bool) -> None:
        value = jsontext.strip(text)
        if not (is_json and jsontext.is_json(value)):
            value = f'"{jsontext.escape(text)}"'
        self._write_name(name)
        self._emit(value)

    def _write_name(self, name: str) -> None:
        opening = ", " if self._num_written else "{"
        self._num_written += 1
        self._emit(f'{opening}"{jsontext.escape(name)}": ')

    def _release_wrapper(self) -> None:
        if self._wrapper is not None:
            name, text, is_json = self._wrapper
            self._wrapper = None
            self._write(name, text, is_json=is_json)

    def _unwrap(self) -> bool:
        """Use the wrapped object itself if the tool's schema has all of its keys."""
        if self._wrapper is None or self._properties is None:
            return False
        _, text, is_json = self._wrapper
        if is_json and jsontext.strip(text).startswith('"') and jsontext.is_json(text):
            text = jsontext.load(text)
        text = jsontext.strip(text)
        keys = jsontext.object_keys(text)
        if keys is None or not self._properties.issuperset(keys) or jsontext.has_surrogate(text):
            return False
        self._emit(text)
        return True
