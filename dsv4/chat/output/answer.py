"""Detokenises an answer: whole characters, without its stop string."""

from collections.abc import Sequence

from dsv4.chat.output.stops import StopMatcher
from dsv4.chat.tokenizer import Tokenizer


class AnswerText:
    """Without a tokenizer the text is empty and only stop ids end an answer."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str], stop_ids: frozenset[int]
    ) -> None:
        self._detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
        self._stops = StopMatcher(stop)
        self.stop_ids = stop_ids

    def push(self, token_id: int) -> tuple[str, str | int | None]:
        """New text, and the stop id or stop string that ends the answer."""
        if token_id in self.stop_ids:
            return "", token_id
        if self._detokenizer is None:
            return "", None
        shown, stop = self._stops.push(self._detokenizer.push(token_id))
        if stop is not None:
            self._detokenizer = None  # what follows a stop string is not shown
        return shown, stop

    def finish(self) -> str:
        """The buffered text, at the end of the answer."""
        if self._detokenizer is None:
            return ""
        shown, stop = self._stops.push(self._detokenizer.finish())
        return shown if stop is not None else shown + self._stops.finish()
