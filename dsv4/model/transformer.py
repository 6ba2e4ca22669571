"""The whole model: embedding, blocks, head.

The residual is `hc_mult` streams per token. Before each half-block they are collapsed into one
normalised row; after it, its result is spread over the streams. The update after one half-block
and the collapse before the next are one op (`mhc_boundary`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.kinds import LayerState
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.formats.quantized import Weight, part_of_whole
from dsv4.model.attention import Attention
from dsv4.model.exchange import Exchange, SingleRank
from dsv4.model.inputs import StepInputs
from dsv4.model.mhc import finish, mix_site
from dsv4.model.moe import MoE
from dsv4.model.weights import Weights
from dsv4.ops.gemm.embed import embed
from dsv4.ops.mhc.mix import Residual, Update
from dsv4.ops.moe.placed import PlacedExperts
from dsv4.parallel.comm import SingleRankComm
from dsv4.parallel.layout import RankLayout


class Block:
    def __init__(
        self, config: ModelConfig, ratio: int, weights: Weights, layout: RankLayout, *, hashed: bool
    ) -> None:
        """`hashed`: the token id chooses the experts, not a router."""
        self.attention_site = mix_site(config, weights, "hc_attn", "attn_norm")
        self.attention = Attention(config, ratio, weights.under("attn."), layout)
        self.ffn_site = mix_site(config, weights, "hc_ffn", "ffn_norm")
        self.ffn = MoE(config, weights.under("ffn."), hashed=hashed)

    def __call__(
        self, residual: Residual, step: StepInputs, state: LayerState, sharing: SingleRank
    ) -> Residual:
        residual = self.attend(residual, step, state, sharing)
        return self.ffn(residual, self.ffn_site, step.token_ids, sharing)

    def attend(
        self, residual: Residual, step: StepInputs, state: LayerState, sharing: SingleRank
    ) -> Residual:
        """The first half: collapse the streams, project the row, attend."""
        matrices = self.attention.inputs(residual.streams.dtype)
        streams, post, comb, projected = sharing.mix_linear(residual, self.attention_site, matrices)
        y = self.attention(projected, step, state, sharing)
        return Residual(streams, Update(y, post, comb))


@dataclass(frozen=True)
class DraftTaps:
    """What a drafter reads from a step: the output streams of some blocks."""

    layers: tuple[int, ...]
    rows: Tensor  # [rows, streams, size]; `means`: [rows, layers, size], means over the streams
    means: bool = False

    def take(self, layer: int, residual: Residual) -> None:
        for place in (place for place, wanted in enumerate(self.layers) if wanted == layer):
            streams = finish(residual)
            if self.means:
                self.rows[: len(streams), place].copy_(streams.mean(1, dtype=torch.float32))
            else:
                self.rows[: len(streams)].copy_(streams)

    def of_last(self, num_layers: int) -> "DraftTaps":
        """For a model with too few layers to have these: taps its last layer instead."""
        return replace(self, layers=(num_layers - 1,) * len(self.layers))


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        table: Mapping[str, Weight],
        dtype: torch.dtype,
        exchange: Exchange | None = None,
    ) -> None:
        """`table`: this rank's parameters by canonical name; `dtype`: the activations' dtype."""
        self.exchange = exchange or Exchange(RankLayout(), SingleRankComm(), config)
        layout = self.exchange.layout
        layout.check(config)
        if layout.tp > 1:
            device = next(iter(table.values())).device
            self.exchange.expert_load = torch.zeros(2, dtype=torch.int64, device=device)
        weights = Weights(table)
        self.config = config
        self.dtype = dtype
        if layout.is_first:
            self.embedding = weights.tensor("embed.weight")
        if layout.is_last:
            self.head = part_of_whole(weights.take("head.weight"), config.vocab_size)
            self.head_site = mix_site(config, weights, "hc_head", "norm")
        self.blocks = [
            Block(
                config,
                config.compress_ratios[layer],
                weights.under(f"layers.{layer}."),
                layout,
                hashed=layer < config.num_hash_layers,
            )
            for layer in layout.layers(config)
        ]
        if weights.left:
            raise CheckpointError(f"unused weights: {sorted(weights.left)[:5]}")

    def distinct(self) -> tuple["Transformer", list[int]]:
        """A model with one block of each kind, and their indices: enough to compile every kernel
        of the whole model."""
        found: dict[Any, int] = {}
        for layer, block in enumerate(self.blocks):
            found.setdefault(_likeness(block), layer)
        few = copy.copy(self)
        few.blocks = [self.blocks[layer] for layer in found.values()]
        return few, list(found.values())

    def __call__(
        self, step: StepInputs, state: Sequence[LayerState], taps: DraftTaps | None = None
    ) -> Tensor:
        """fp32 logits `[logits_rows, vocabulary]`; adds the step's tokens to `state`. With several
        ranks, rank 0 and the last stage get the logits; the others get no rows. `taps`: filled for
        a drafter; single rank only."""
        logits, layout = self.run_stage(step, state, taps), self.exchange.layout
        if layout.rank == 0 and layout.pp > 1:
            logits = logits.new_empty(step.num_logits, self.config.vocab_size)
            self.exchange.comm.receive_logits(logits)()
        return logits

    def run_stage(
        self, step: StepInputs, state: Sequence[LayerState], taps: DraftTaps | None = None
    ) -> Tensor:
        """This rank's part of a step, without waiting for later stages. The last stage returns the
        logits and sends them to rank 0; other stages return no rows."""
        layout = self.exchange.layout
        sharing = self.exchange.sharing(step.token_ids.shape[0], step.homes)
        residual = Residual(self._streams(step, sharing))
        for layer, block in enumerate(self.blocks):
            residual = block(residual, step, state[layer], sharing)
            if taps is not None:
                taps.take(layer, residual)
        if not layout.is_last:
            self.exchange.comm.send(finish(residual).contiguous(), layout.rank + layout.tp)
            return torch.empty((0, self.config.vocab_size), device=step.token_ids.device)
        hidden = sharing.hidden(residual, self.head_site, step.logits_rows)
        logits = self.exchange.logits(hidden, self.head)
        if layout.pp > 1 and layout.rank == layout.logits_rank:
            self.exchange.comm.send_logits(logits.contiguous())
        return logits

    def _streams(self, step: StepInputs, sharing: SingleRank) -> Tensor:
        """Streams of this rank's own rows: embedded, or received from the previous stage."""
        token_ids, layout = sharing.own(step.token_ids), self.exchange.layout
        count, c = token_ids.shape[0], self.config
        if layout.is_first:
            return embed(token_ids, self.embedding, c.hc_mult, self.dtype)
        streams = torch.empty(
            (count, c.hc_mult, c.hidden_size), dtype=self.dtype, device=token_ids.device
        )
        self.exchange.comm.receive(streams, layout.rank - layout.tp)
        return streams


def _likeness(value: Any) -> Any:
    """A key that is equal for parts of the model that launch the same kernels."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, PlacedExperts):
        return value.shape, value.activations, _likeness(value.table.beside)
    if isinstance(value, list | tuple):
        return tuple(map(_likeness, value))
    if hasattr(value, "__dict__"):
        names = [f.name for f in fields(value)] if is_dataclass(value) else sorted(vars(value))
        parts = ((name, _likeness(getattr(value, name))) for name in names)
        return type(value), tuple(parts)
    return value
