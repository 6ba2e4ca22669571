"""What a decode step reads and writes, at addresses that never change.

Row `i` belongs to place `i` of the batch. A step of `n` places reads the first `n` rows, so one
set of buffers serves every batch size. Only the tables of compressed entries exist once per
context size: their width decides how much of the state a step looks at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dsv4.cache.geometry import Geometry, Pool
from dsv4.model.inputs import StepInputs
from dsv4.ops.ragged import Ragged
from dsv4.ops.sample.accept import NextInputs
from dsv4.ops.sample.sample import SampleInputs


@dataclass(frozen=True)
class Bucket:
    """A shape a decode step can have: places, tokens of context, and what comes out."""

    batch: int
    context: int
    samples: bool  # a token for each place, which is the next input; else only logits


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then by 8 to 64, by 16 to 128, by 32; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max(most, 128) + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def context_sizes(most: int) -> list[int]:
    """4096 tokens and then four times as many; the last is `most`."""
    sizes, size = [], 4096
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]


class DecodeBuffers:
    def __init__(
        self, geometry: Geometry, max_sequences: int, max_context: int, device: torch.device
    ) -> None:
        count = max_sequences
        self.device = device
        self.vocab_size = geometry.config.vocab_size
        self.batches = batch_sizes(max_sequences)
        self.contexts = context_sizes(max_context)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.token_ids, self.positions, self.ends, self.slots = (ints(count) for _ in range(4))
        self.ends += 1
        self.chosen = floats(count)
        self.logits = floats(count, self.vocab_size)
        self._rows = torch.arange(count, device=device)
        self._sampling = _no_sampling(count, device, self.ends)
        window = ints(count, geometry.window_columns)
        self.tables: dict[int, dict[Pool, Tensor]] = {
            context: {
                "window": window,
                "csa": ints(count, max(1, len(geometry.pages_needed("csa", 0, context)))),
                "hca": ints(count, max(1, len(geometry.pages_needed("hca", 0, context)))),
            }
            for context in self.contexts
        }

    def bucket(self, num_places: int, length: int, samples: bool) -> Bucket:
        """The smallest that takes this many places, the longest having `length` tokens after."""
        batch = next(size for size in self.batches if size >= num_places)
        return Bucket(batch, next(size for size in self.contexts if size >= length), samples)

    def buckets(self) -> list[Bucket]:
        """Every one that can occur, the largest first: workspaces are made once."""
        return [
            Bucket(batch, context, samples)
            for context in reversed(self.contexts)
            for batch in reversed(self.batches)
            for samples in (True, False)
        ]

    def inputs(self, bucket: Bucket) -> StepInputs:
        n, tables = bucket.batch, self.tables[bucket.context]
        positions, rows = self.positions[:n], self._rows[:n]
        batch = Ragged(positions, rows, rows, positions, self.ends[:n], self.slots[:n])
        return StepInputs(
            token_ids=self.token_ids[:n],
            batch=batch,
            window_table=tables["window"][:n],
            csa_table=tables["csa"][:n],
            hca_table=tables["hca"][:n],
            logits_rows=None,
        )

    def sampling(self, bucket: Bucket) -> SampleInputs:
        return _rows_of(self._sampling, slice(0, bucket.batch))

    def next_inputs(self, bucket: Bucket) -> NextInputs:
        n = bucket.batch
        return NextInputs(self.token_ids[:n], self.positions[:n], self.ends[:n], self.chosen[:n])

    @property
    def sampling_settings(self) -> dict[str, Tensor]:
        """By name, one number for each place."""
        return {name: getattr(self._sampling, name) for name in _SETTINGS}

    def set_sampling(self, places: Sequence[int], inputs: SampleInputs) -> None:
        """Settings of some places, from tensors on the host; positions follow the tokens."""
        index = to_device(torch.tensor(places, dtype=torch.int64), self.device)
        for name, target in self.sampling_settings.items():
            target[index] = to_device(getattr(inputs, name), self.device).to(target.dtype)


_SETTINGS = tuple(
    item.name
    for item in fields(SampleInputs)
    if item.name not in ("positions", "prompt_counts", "output_counts", "bias")
)


def _no_sampling(count: int, device: torch.device, ends: Tensor) -> SampleInputs:
    """Every place takes its best token; the sampled token's position is the input's plus one."""
    whole = ("top_k", "seeds")
    settings = {
        name: torch.zeros(
            count, dtype=torch.int64 if name in whole else torch.float32, device=device
        )
        for name in _SETTINGS
    }
    return SampleInputs(
        **settings, positions=ends, prompt_counts=None, output_counts=None, bias=None
    )


def _rows_of(inputs: SampleInputs, rows: slice) -> SampleInputs:
    changed = {name: getattr(inputs, name)[rows] for name in (*_SETTINGS, "positions")}
    return replace(inputs, **changed)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait: from pinned memory on a GPU, the tensor itself on a CPU."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)
