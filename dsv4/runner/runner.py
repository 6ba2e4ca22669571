"""A step: work in, logits out. Holds the model and its state; knows nothing of requests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS, Pool
from dsv4.cache.kinds import KINDS, LayerState
from dsv4.cache.pages import SequencePages, StatePages
from dsv4.model.inputs import StepInputs
from dsv4.model.transformer import Transformer
from dsv4.ops.ragged import make_ragged
from dsv4.runner.settings import Settings


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence, and for how many of the last ones logits are wanted."""

    pages: SequencePages
    token_ids: list[int]
    num_logits: int


class Runner:
    def __init__(self, model: Transformer, settings: Settings) -> None:
        config = model.config
        self.model = model
        self.device = torch.device(settings.device)
        geometry = settings.geometry(config)
        num_pages = geometry.num_pages(settings.max_context, settings.max_sequences)
        self.pages = StatePages(geometry, settings.max_sequences, num_pages)
        self._window_columns = geometry.window_columns
        self._state: list[LayerState] = [
            KINDS[kind].allocate(geometry, settings.max_sequences, num_pages, settings.device)
            for kind in config.kinds
        ]

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> Tensor:
        """Logits fp32 of the wanted tokens, `[rows, vocabulary]`, in the order of `chunks`.

        Pages are taken first; if they do not suffice, nothing has changed.
        """
        growth = self.pages.prepare([c.pages for c in chunks], [len(c.token_ids) for c in chunks])
        try:
            logits = self.model(self._inputs(chunks), self._state)
        except BaseException:
            self.pages.cancel(growth)
            raise
        self.pages.apply(growth)
        return logits

    def _inputs(self, chunks: list[Chunk]) -> StepInputs:
        num_new = [len(chunk.token_ids) for chunk in chunks]
        batch = make_ragged(
            [chunk.pages.length for chunk in chunks],
            num_new,
            [chunk.pages.slot for chunk in chunks],
            self.device,
        )
        rows: list[int] = []
        end = 0
        for chunk, count in zip(chunks, num_new, strict=True):
            end += count
            rows += range(end - chunk.num_logits, end)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        tables = {pool: self._table(chunks, pool) for pool in POOLS}
        return StepInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=self.device),
            batch=batch,
            window_table=tables["window"],
            csa_table=tables["csa"],
            hca_table=tables["hca"],
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=self.device),
        )

    def _table(self, chunks: list[Chunk], pool: Pool) -> Tensor:
        if pool == "window":
            width = self._window_columns
        else:
            width = max(1, *(len(chunk.pages.columns[pool]) for chunk in chunks))
        rows = [self.pages.table_row(chunk.pages, pool, width) for chunk in chunks]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)
