"""The whole model: embedding, blocks, head.

The residual is `hc_mult` streams per token. Before each half-block they are collapsed into one
normalised row; after it, its result is spread over the streams. The update after one half-block
and the collapse before the next are one op (`mhc_boundary`). With 4- or 8-bit activations this op
is fused with its consumer, so that the row is quantised where it is computed.
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
from dsv4.model.mhc import collapse_head, mix_site
from dsv4.model.moe import MoE
from dsv4.model.weights import Weights
from dsv4.ops.fused.block import Residual, Update, mix_linear
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.linear import linear
from dsv4.parallel.layout import Layout


class Block:
    def __init__(self, config: ModelConfig, layer: int, weights: Weights, layout: Layout) -> None:
        self.attention_site = mix_site(config, weights, "hc_attn", "attn_norm")
        self.attention = Attention(config, layer, weights.under("attn."), layout)
        self.ffn_site = mix_site(config, weights, "hc_ffn", "ffn_norm")
        self.ffn = MoE(config, layer, weights.under("ffn."))

    def __call__(self, residual: Residual, step: StepInputs, state: LayerState) -> Residual:
        residual = self.attend(residual, step, state)
        return self.ffn(residual, self.ffn_site, step.token_ids)

    def attend(self, residual: Residual, step: StepInputs, state: LayerState) -> Residual:
        """The first half: collapse the streams, project the row, attend."""
        weights, dtypes = self.attention.inputs(residual.streams.dtype)
        streams, post, comb, projected = mix_linear(residual, self.attention_site, weights, dtypes)
        return Residual(streams, Update(self.attention(projected, step, state), post, comb))


class Transformer:
    def __init__(
        self,
        config: ModelConfig,
        table: Mapping[str, Weight],
        dtype: torch.dtype,
        layout: Layout | None = None,
    ) -> None:
        """`table`: every parameter under its canonical name; `dtype`: of the activations."""
        layout = layout or Layout()
        layout.check(config)
        weights = Weights(table)
        self.config = config
        self.dtype = dtype
        self.embedding = weights.tensor("embed.weight")
        self.head = weights.tensor("head.weight")
        self.head_site = mix_site(config, weights, "hc_head", "norm")
        self.blocks = [
            Block(config, layer, weights.under(f"layers.{layer}."), layout)
            for layer in range(config.num_layers)
        ]
        if weights.left:
            raise CheckpointError(f"weights nobody asked for: {sorted(weights.left)[:5]}")

    def distinct(self) -> tuple["Transformer", list[int]]:
        """A model with one block of each kind, and their indices: enough to compile every kernel
        of the whole model."""
        found: dict[Any, int] = {}
        for layer, block in enumerate(self.blocks):
            found.setdefault(_likeness(block), layer)
        few = copy.copy(self)
        few.blocks = [self.blocks[layer] for layer in found.values()]
        return few, list(found.values())

    def __call__(self, step: StepInputs, state: Sequence[LayerState]) -> Tensor:
        """fp32 logits `[logits_rows, vocabulary]`; `state` grows by the step's tokens."""
        streams = embed(step.token_ids, self.embedding, self.config.hc_mult, self.dtype)
        residual = Residual(streams)
        for layer, block in enumerate(self.blocks):
            residual = block(residual, step, state[layer])
        hidden = collapse_head(residual, self.head_site, step.logits_rows)
        return linear(hidden, self.head, torch.float32)


def _likeness(value: Any) -> Any:
    """A key that is equal for two parts of the model that launch the same kernels."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_likeness, value))
    if hasattr(value, "__dict__"):
        parts = ((name, _likeness(part)) for name, part in sorted(vars(value).items()))
        return type(value), tuple(parts)
    return value
