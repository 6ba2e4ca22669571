"""The whole model: embedding, blocks, head.

The residual is `hc_mult` streams per token. Before each half-block they are collapsed into one
normalised row; after it, its result is spread over the streams. The update after one half-block
and the collapse before the next are one op (`mhc_boundary`). With activations of few bits the op
and what reads its row are started as one, so that the row is quantised where it is made.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.kinds import LayerState
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.formats.quantized import Weight
from dsv4.model.attention import Attention
from dsv4.model.inputs import StepInputs
from dsv4.model.mhc import collapse, mix_site
from dsv4.model.moe import MoE
from dsv4.model.weights import Weights
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.linear import linear, linear_multi
from dsv4.ops.mhc.mix import MIX_EXPERTS, MIX_LINEAR, mhc_head
from dsv4.ops.op import Arguments
from dsv4.parallel import Shard


class Block:
    def __init__(self, config: ModelConfig, layer: int, weights: Weights, shard: Shard) -> None:
        self.attention_site = mix_site(config, weights, "hc_attn", "attn_norm")
        self.attention = Attention(config, layer, weights.under("attn."), shard)
        self.ffn_site = mix_site(config, weights, "hc_ffn", "ffn_norm")
        self.ffn = MoE(config, layer, weights.under("ffn."))

    def attend(self, mix: Arguments, step: StepInputs, state: LayerState) -> Arguments:
        """The first half. `mix`: the streams and, but for the first block, what the half-block
        before gave them; the same comes back."""
        mix = {**mix, "site": self.attention_site}
        streams: Tensor = mix["streams"]
        together = {"mix": mix, "linear": self.attention.inputs(streams.dtype)}
        if MIX_LINEAR.accepts(streams.device, together):
            streams, post, comb, projected = MIX_LINEAR.run(together)
        else:
            streams, x, post, comb = collapse(mix)
            projected = linear_multi(x, **together["linear"])
        y = self.attention(projected, step, state)
        return {"streams": streams, "y": y, "post": post, "comb": comb}

    def feed(self, mix: Arguments, token_ids: Tensor) -> Arguments:
        """The second half, as `attend`."""
        mix = {**mix, "site": self.ffn_site}
        streams: Tensor = mix["streams"]
        together = {"mix": mix, **self.ffn.arguments(token_ids)}
        if MIX_EXPERTS.accepts(streams.device, together):
            streams, post, comb, y = MIX_EXPERTS.run(together)
        else:
            streams, x, post, comb = collapse(mix)
            y = self.ffn(x, token_ids)
        return {"streams": streams, "y": y, "post": post, "comb": comb}


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        table: Mapping[str, Weight],
        dtype: torch.dtype,
        shard: Shard | None = None,
    ) -> None:
        """`table`: every parameter under its canonical name; `dtype`: of the activations."""
        shard = shard or Shard()
        weights = Weights(table)
        self.config = config
        self.dtype = dtype
        self.embedding = weights.tensor("embed.weight")
        self.head = weights.tensor("head.weight")
        self.head_site = mix_site(config, weights, "hc_head", "norm")
        self.blocks = [
            Block(config, layer, weights.under(f"layers.{layer}."), shard)
            for layer in range(config.num_layers)
        ]
        if weights.left:
            raise CheckpointError(f"weights nobody asked for: {sorted(weights.left)[:5]}")

    def distinct(self) -> tuple["Transformer", list[int]]:
        """The model with one block of each kind alone, and which these are: what all of them need
        to have compiled."""
        found: dict[Any, int] = {}
        for layer, block in enumerate(self.blocks):
            found.setdefault(_likeness(block), layer)
        few = copy.copy(self)
        few.blocks = [self.blocks[layer] for layer in found.values()]
        return few, list(found.values())

    def __call__(self, step: StepInputs, state: Sequence[LayerState]) -> Tensor:
        """Logits fp32 `[logits_rows, vocabulary]`; `state` grows by the step's tokens."""
        streams = embed(step.token_ids, self.embedding, self.config.hc_mult, self.dtype)
        mix: Arguments = {"streams": streams}
        for layer, block in enumerate(self.blocks):
            mix = block.attend(mix, step, state[layer])
            mix = block.feed(mix, step.token_ids)
        rows = step.logits_rows
        if rows is not None:
            mix = {name: tensor[rows] for name, tensor in mix.items()}
        return linear(mhc_head(**mix, site=self.head_site), self.head, torch.float32)


def _likeness(value: Any) -> Any:
    """Equal for two parts of the model that launch the same kernels."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_likeness, value))
    if hasattr(value, "__dict__"):
        parts = ((name, _likeness(part)) for name, part in sorted(vars(value).items()))
        return type(value), tuple(parts)
    return value
