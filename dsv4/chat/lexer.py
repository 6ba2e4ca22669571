"""Finding markers by their spelling in a text that arrives in pieces."""

from collections.abc import Iterator, Sequence


class MarkerLexer:
    """Cuts a text into plain pieces and markers, holding back only what may become a marker.

    `push` yields (text, is_marker). Linear: each character is looked at a bounded number of
    times, because markers are short and a held piece is never longer than one of them.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._firsts = tuple(sorted({marker[0] for marker in markers}))
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        text = self._held + text
        self._held = ""
        if not any(first in text for first in self._firsts):
            if text:
                yield text, False
            return
        start = position = 0
        next_at = dict.fromkeys(self._firsts, -1)
        while True:
            position = self._candidate(text, position, next_at)
            if position < 0:
                break
            marker = self._marker_at(text, position)
            if marker is not None:
                if position > start:
                    yield text[start:position], False
                yield marker, True
                start = position = position + len(marker)
            elif self._may_become_marker(text, position):
                self._held = text[position:]
                break
            else:
                position += 1
        end = len(text) - len(self._held)
        if end > start:
            yield text[start:end], False

    def finish(self) -> str:
        """The held piece, which can no longer become a marker."""
        held, self._held = self._held, ""
        return held

    def _candidate(self, text: str, position: int, next_at: dict[str, int]) -> int:
        # Each first character's next place is remembered: searching again for one that is far
        # away, at every place of another, would take quadratic time.
        nearest = -1
        for first in self._firsts:
            place = next_at[first]
            if place < position:
                place = text.find(first, position)
                place = len(text) if place < 0 else place
                next_at[first] = place
            if place < len(text) and (nearest < 0 or place < nearest):
                nearest = place
        return nearest

    def _marker_at(self, text: str, position: int) -> str | None:
        for marker in self._markers:
            if text.startswith(marker, position):
                return marker
        return None

    def _may_become_marker(self, text: str, position: int) -> bool:
        rest_len = len(text) - position
        return any(
            rest_len < len(marker) and marker.startswith(text[position:])
            for marker in self._markers
        )


def split_markers(text: str, markers: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Cut a whole text into (piece, is_marker)."""
    lexer = MarkerLexer(markers)
    yield from lexer.push(text)
    rest = lexer.finish()
    if rest:
        yield rest, False
