"""A step's inputs to the model: tokens, their sequences and positions, and the page tables."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.ops.core.ragged import Ragged


@dataclass(frozen=True)
class HomeRows:
    """With data-parallel attention: what the homes of a tensor group bring to a step."""

    rows: tuple[int, ...]  # token rows of each home; some may have none
    logits: tuple[int, ...]  # rows of logits of each home
    order: Tensor  # [logits] place of each in `[homes, max(logits)]`, flattened


@dataclass(frozen=True)
class StepInputs:
    token_ids: Tensor  # [tokens] int64
    batch: Ragged
    window_table: Tensor  # [sequences, columns] page numbers; a ring
    csa_table: Tensor
    hca_table: Tensor
    logits_rows: Tensor | None  # [rows] tokens to compute logits for; None: all
    homes: HomeRows | None = None  # the rest then describes this rank's own sequences only

    @property
    def num_logits(self) -> int:
        if self.homes is not None:
            return len(self.homes.order)
        return len(self.token_ids if self.logits_rows is None else self.logits_rows)
