"""The whole model: embedding, blocks, head.

The residual is `hc_mult` streams per token. Before each half-block they are collapsed into one
normalised row; after it, its result is spread over the streams. The update after one half-block
and the collapse before the next are one op (`mhc_boundary`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsv4.cache.kinds import LayerState
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.formats.quantized import Weight
from dsv4.model.attention import Attention
from dsv4.model.inputs import StepInputs
from dsv4.model.mhc import mix_site
from dsv4.model.moe import MoE
from dsv4.model.weights import Weights
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.linear import linear
from dsv4.ops.mhc.mix import mhc_boundary, mhc_head, mhc_pre
from dsv4.ops.parts import Parts
from dsv4.parallel import Shard


class Block:
    def __init__(self, config: ModelConfig, layer: int, weights: Weights, shard: Shard) -> None:
        self.attention_site = mix_site(config, weights, "hc_attn", "attn_norm")
        self.attention = Attention(config, layer, weights.under("attn."), shard)
        self.ffn_site = mix_site(config, weights, "hc_ffn", "ffn_norm")
        self.ffn = MoE(config, layer, weights.under("ffn."))


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

    def __call__(self, step: StepInputs, state: Sequence[LayerState]) -> Tensor:
        """Logits fp32 `[logits_rows, vocabulary]`; `state` grows by the step's tokens."""
        streams = embed(step.token_ids, self.embedding, self.config.hc_mult, self.dtype)
        x, post, comb = mhc_pre(streams, self.blocks[0].attention_site)
        y: Tensor | Parts = x
        for layer, block in enumerate(self.blocks):
            if layer > 0:
                streams, x, post, comb = mhc_boundary(streams, y, post, comb, block.attention_site)
            y = block.attention(x, step, state[layer])
            streams, x, post, comb = mhc_boundary(streams, y, post, comb, block.ffn_site)
            y = block.ffn(x, step.token_ids)
        rows = step.logits_rows
        if rows is not None:
            streams, y, post, comb = streams[rows], y[rows], post[rows], comb[rows]
        h = mhc_head(streams, y, post, comb, self.head_site)
        return linear(h, self.head, torch.float32)
