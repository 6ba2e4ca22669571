"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence

from dsv4.chat.fields import fail, read_list, read_text
from dsv4.request import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS


def read_stops(value: object, path: str = "stop") -> tuple[str, ...]:
    """One string or a list of them."""
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else read_list(value, path, MAX_STOP_STRINGS)
    stops = []
    for place, entry in enumerate(entries):
        stop = read_text(entry, f"{path}[{place}]")
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            fail(f"{path}[{place}]", f"{len(stop)} characters", f"1 to {MAX_STOP_CHARACTERS}")
        stops.append(stop)
    return tuple(dict.fromkeys(stops))


class StopMatcher:
    """Releases text until a stop string is complete; buffers only what may still become one.

    The string that is complete first wins; of several that end together, the longest. Matching
    keeps one Knuth-Morris-Pratt state per string, so no character is examined twice.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._buffered = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be released, and the stop string if one was completed."""
        if not self._stops:
            return text, None
        for place, char in enumerate(text):
            found = self._step(char)
            if found is not None:
                free = self._buffered + text[: place + 1]
                self._buffered = ""
                return free[: len(free) - len(found)], found
        free = self._buffered + text
        num_buffered = max(self._matched)
        self._buffered = free[len(free) - num_buffered :]
        return free[: len(free) - num_buffered], None

    def finish(self) -> str:
        held, self._buffered = self._buffered, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> str | None:
        found: str | None = None
        for which, stop in enumerate(self._stops):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = self._failures[which][matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[which] = matched
            if matched == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
        return found


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper border."""
    table = [0] * len(pattern)
    matched = 0
    for place in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[place]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[place]:
            matched += 1
        table[place] = matched
    return table
