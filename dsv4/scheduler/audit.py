"""The audit: some finished requests are rerun without the prefix cache and must match bit for bit.

A difference is logged, counted, and written to a file with everything needed to reproduce it:
tokens, settings, seed, and both answers.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsv4.request import MAX_PRIORITY, Request, TokenLogprobs
from dsv4.scheduler.sequence import SequenceState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditedAnswer:
    """The answer of the first run."""

    request: Request
    seed: int
    results: tuple[TokenLogprobs, ...]
    num_cached: int
    num_preemptions: int


class Audit:
    def __init__(self, share: float, folder: str, settings: dict[str, Any]) -> None:
        self._share = share
        self._folder = Path(folder)
        self._settings = settings
        self.num_audited = self.num_differences = 0

    def wants(self, request_id: str) -> bool:
        """Whether to audit a request: a fixed share, decided by a hash of its id."""
        digest = hashlib.blake2b(request_id.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") < self._share * 2**32

    def again(self, sequence: SequenceState) -> tuple[Request, AuditedAnswer]:
        """The rerun: as long as the first answer, no stop conditions, lowest priority."""
        request = sequence.request
        params = replace(
            request.params, max_tokens=len(sequence.results), stop=(), stop_ids=(), logprobs=None
        )
        answer = AuditedAnswer(
            request,
            sequence.seed,
            tuple(sequence.results),
            sequence.num_cached or 0,
            sequence.num_preemptions,
        )
        name = f"audit of {request.id}"
        return Request(name, request.prompt_ids, params, priority=-MAX_PRIORITY), answer

    def compare(self, answer: AuditedAnswer, again: SequenceState) -> None:
        self.num_audited += 1
        first = [(item.token_id, item.logprob) for item in answer.results]
        second = [(item.token_id, item.logprob) for item in again.results]
        if first == second:
            return
        self.num_differences += 1
        place = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), -1)
        log.error(
            "request %r gave another answer when it ran again alone: token %d; see %s",
            answer.request.id,
            place,
            self._write(answer, place, first, second),
        )

    def _write(self, answer: AuditedAnswer, place: int, first: Any, second: Any) -> str:
        replay = {
            "request": asdict(answer.request),
            "seed": answer.seed,
            "num_cached": answer.num_cached,
            "num_preemptions": answer.num_preemptions,
            "settings": self._settings,
            "first_difference": place,
            "answer": first,
            "answer_alone": second,
        }
        path = self._folder / f"difference-{self.num_differences}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:  # it contains client data
                json.dump(replay, file, indent=1)
        except OSError as error:
            return f"no file, because of {error}"
        return str(path)
