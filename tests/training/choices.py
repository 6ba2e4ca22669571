"""What the trained network chooses, for the tie detector."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from tests.oracle.ties import Choices
from training import attention, network


@contextmanager
def recorded_choices() -> Iterator[Choices]:
    """Of one forward pass over one row of tokens; entries come in chunks of tokens."""
    found: Choices = []
    right = attention.top_mask
    num_rows = 0  # of the chunks of one layer so far

    def entries(scores: Tensor, topk: int) -> Tensor:
        nonlocal num_rows
        kept = right(scores, topk)
        position = torch.arange(num_rows, num_rows + scores.shape[1])
        visible = torch.arange(scores.shape[2]) < ((position + 1) // 4)[:, None]
        mask = kept[0] & visible
        if num_rows:
            before = found.pop()
            before = torch.nn.functional.pad(before, (0, mask.shape[1] - before.shape[1]))
            mask = torch.cat((before, mask))
        found.append(mask)
        num_rows += scores.shape[1]
        return kept

    def experts(scores: Tensor, topk: int) -> Tensor:
        kept = right(scores, topk)
        found.append(kept)
        return kept

    def ffn(*args: object, **kwargs: object) -> Tensor:
        nonlocal num_rows
        num_rows = 0
        return right_ffn(*args, **kwargs)

    right_ffn = network.Network._ffn
    with (
        patch.object(attention, "top_mask", entries),
        patch.object(network, "top_mask", experts),
        patch.object(network.Network, "_ffn", ffn),
    ):
        yield found
