"""Logits of steps that later stages still compute. They arrive on rank 0 in the order of the steps,
so several steps can be in flight, one for each stage."""

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
        """For one more step. What has to go belongs to steps whose requests were aborted."""
        while len(self._pending) >= self._most:
            self._receive_oldest()

    def expect(self, num_rows: int) -> Tensor | None:
        """Those of the step that was just submitted; `wait_for` fills them. None where they are
        not sent: on one stage, and on other ranks."""
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
