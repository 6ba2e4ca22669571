"""What a step hands to the model: tokens, where they belong, and the page tables."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.ops.ragged import Ragged


@dataclass(frozen=True)
class StepInputs:
    token_ids: Tensor  # [tokens] int64
    batch: Ragged
    window_table: Tensor  # [sequences, columns] page numbers; the columns go round
    csa_table: Tensor
    hca_table: Tensor
    logits_rows: Tensor | None  # [rows] tokens whose logits are wanted; None: all
