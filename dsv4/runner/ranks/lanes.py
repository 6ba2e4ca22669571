"""Logits of steps that later stages are still computing. They arrive on rank 0 in step order, so
several steps can be in flight, one per stage."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.model.transformer import Transformer


class LogitsInFlight:
    def __init__(self, model: Transformer, device: torch.device) -> None:
        self._model, self._device = model, device
        layout = model.exchange.layout
        self._has_stages = layout.rank == 0 and layout.pp > 1
        self._most = layout.pp  # more would fill the buffers between stages
        self._pending: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def make_room(self) -> None:
        """Make room for one more step. Logits dropped here belong to aborted requests."""
        while len(self._pending) >= self._most:
            self._receive_oldest()

    def expect(self, num_rows: int) -> Tensor | None:
        """Logits of the step just submitted; `wait_for` fills them. None where none are sent: with
        one stage, and on other ranks."""
        if not self._has_stages:
            return None
        logits = torch.empty((num_rows, self._model.config.vocab_size), device=self._device)
        self._pending.append((logits, self._model.exchange.comm.receive_logits(logits)))
        return logits

    def wait_for(self, logits: Tensor | None) -> None:
        while any(logits is values for values, _ in self._pending):
            self._receive_oldest()

    def wait_for_all(self) -> None:
        while self._pending:
            self._receive_oldest()

    def _receive_oldest(self) -> None:
        _, wait = self._pending.popleft()
        wait()
