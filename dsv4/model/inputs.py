"""A step's inputs to the model: tokens, their sequences and positions, and the page tables."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.ops.core.ragged import Ragged


@dataclass(frozen=True)
class StepInputs:
    token_ids: Tensor  # [tokens] int64
    batch: Ragged
    window_table: Tensor  # [sequences, columns] page numbers; a ring
    csa_table: Tensor
    hca_table: Tensor
    logits_rows: Tensor | None  # [rows] tokens to compute logits for; None: all
