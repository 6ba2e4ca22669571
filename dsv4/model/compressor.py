"""A compressor: two projections of the layer's input, merged into one entry per block."""

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.model.weights import Weights
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.kv.compress import Compression, CompressorState
from dsv4.ops.kv.pool import PagedPool


class Compressor:
    def __init__(
        self, config: ModelConfig, ratio: int, frequencies: Tensor, weights: Weights
    ) -> None:
        self.ratio = ratio
        self.eps = config.rms_norm_eps
        self.frequencies = frequencies
        # in the order of their results
        self.matrices: list[Weight] = [weights.take("wkv.weight"), weights.take("wgate.weight")]
        self.ape = weights.tensor("ape")
        self.norm = weights.tensor("norm.weight")

    def of(
        self,
        projected: list[Tensor],
        dtype: torch.dtype,
        batch: Ragged,
        state: CompressorState,
        pool: PagedPool,
        table: Tensor,
    ) -> Compression:
        """`projected`: this compressor's matrices applied to the layer's input, fp32."""
        values, gates = projected
        return Compression(
            values=values,
            gates=gates,
            ape=self.ape,
            norm=self.norm,
            frequencies=self.frequencies,
            eps=self.eps,
            ratio=self.ratio,
            dtype=dtype,
            state=state,
            batch=batch,
            pool=pool,
            table=table,
        )
