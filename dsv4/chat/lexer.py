"""Finding markers by their spelling in a text that arrives in pieces."""

from collections.abc import Iterator, Sequence


class MarkerLexer:
    """Splits a text into plain pieces and markers, buffering only what may become a marker.

    `push` yields (text, is_marker). Linear: each character is examined a bounded number of times,
    because markers are short and the buffer is never longer than one of them.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._longest = max(map(len, markers))
        self._firsts = frozenset(marker[0] for marker in markers)
        self._buffered = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        text = self._buffered + text
        self._buffered = ""
        if self._firsts.isdisjoint(text):  # most pieces of an output
            if text:
                yield text, False
            return
        end = 0
        for piece, is_marker in split_markers(text, self._markers):
            end += len(piece)
            if not is_marker and end == len(text):
                hold_at = self._hold_at(piece)
                self._buffered = piece[hold_at:]
                piece = piece[:hold_at]
            if piece:
                yield piece, is_marker

    def finish(self) -> str:
        """The buffered piece, which can no longer become a marker."""
        held, self._buffered = self._buffered, ""
        return held

    def _hold_at(self, text: str) -> int:
        """Where at the end of the text a marker may have started."""
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts and any(
                len(marker) > len(text) - place and marker.startswith(text[place:])
                for marker in self._markers
            ):
                return place
        return len(text)


def split_markers(text: str, markers: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Split a whole text into (piece, is_marker). No marker is part of another."""
    # Each marker's next position is cached, so no part of the text is searched twice for it.
    next_at = {marker: text.find(marker) for marker in markers}
    next_at = {marker: place for marker, place in next_at.items() if place >= 0}
    start = 0
    while next_at:
        marker = min(next_at, key=next_at.__getitem__)
        place = next_at[marker]
        if place > start:
            yield text[start:place], False
        yield marker, True
        start = place + len(marker)
        following = text.find(marker, start)
        if following < 0:
            del next_at[marker]
        else:
            next_at[marker] = following
    if start < len(text):
        yield text[start:], False
