"""Attention of one layer. Key and value are one vector per token, shared by all heads.

Every kind attends to a sliding window. Ratio-128 layers also attend to every compressed entry,
ratio-4 layers to the entries their indexer selects. Matrices with the same input run as one op.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.cache.kinds import CsaState, HcaState, LayerState
from dsv4.config import ModelConfig
from dsv4.formats.quantized import Weight, part_of_whole
from dsv4.model.compressor import Compressor
from dsv4.model.exchange import SingleRank
from dsv4.model.indexer import Indexer
from dsv4.model.inputs import StepInputs
from dsv4.model.weights import Weights
from dsv4.ops.attention.attention import Compressed, Visible
from dsv4.ops.attention.query import Queries
from dsv4.ops.fused.block import norm_store, query_attention
from dsv4.ops.gemm.linear import linear_multi
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.kv.compress import Compression
from dsv4.ops.kv.kv_store import WindowKey
from dsv4.ops.kv.rope import rope_frequencies, yarn_frequencies
from dsv4.parallel.layout import RankLayout, k_ranges


def layer_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """The rotation frequencies of a layer; YaRN applies only to layers with a compressor."""
    if ratio == 0:
        return rope_frequencies(config.rope_head_dim, config.rope_theta)
    return yarn_frequencies(
        config.rope_head_dim,
        config.compress_rope_theta,
        config.yarn_factor,
        config.yarn_original_len,
        config.yarn_beta_fast,
        config.yarn_beta_slow,
    )


class Attention:
    def __init__(
        self, config: ModelConfig, ratio: int, weights: Weights, layout: RankLayout
    ) -> None:
        self.num_heads = len(layout.heads(config))
        self.num_groups = len(layout.groups(config))
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        self.ratio = ratio
        self.eps = config.rms_norm_eps
        self.wq_a = weights.take("wq_a.weight")
        self.q_norm = weights.tensor("q_norm.weight")
        rows = config.num_heads * config.head_dim
        self.wq_b = part_of_whole(weights.take("wq_b.weight"), rows)
        self.wkv = weights.take("wkv.weight")
        self.kv_norm = weights.tensor("kv_norm.weight")
        self.sink = weights.tensor("attn_sink")
        rows = config.o_groups * config.o_lora_rank
        self.wo_a = part_of_whole(weights.take("wo_a.weight"), rows)
        wo_b = weights.take("wo_b.weight")
        self.wo_b = part_of_whole(wo_b, config.hidden_size, k_ranges(config))
        self.frequencies = layer_frequencies(config, ratio).to(self.sink.device)
        self.compressor = self.indexer = None
        if ratio:
            under = weights.under("compressor.")
            self.compressor = Compressor(config, ratio, self.frequencies, under)
        if ratio == 4:
            self.indexer = Indexer(config, self.frequencies, weights.under("indexer."))

    def inputs(self, dtype: torch.dtype) -> tuple[list[Weight], list[torch.dtype]]:
        """The matrices that read the layer's input, and the dtypes of their results: query latent
        and window key in `dtype`, compressor and indexer inputs in fp32."""
        matrices: list[Weight] = [self.wq_a, self.wkv]
        if self.compressor is not None:
            matrices += self.compressor.matrices
        if self.indexer is not None:
            matrices += [*self.indexer.compressor.matrices, self.indexer.weights_proj]
        wide = [torch.float32] * (len(matrices) - 2)
        return matrices, [dtype, dtype, *wide]

    def __call__(
        self, projected: list[Tensor], step: StepInputs, state: LayerState, sharing: SingleRank
    ) -> Tensor | PartialSums:
        """The results of `inputs` -> `[tokens, hidden]`; updates the layer's state."""
        latent, kv, *rest = projected
        if not len(kv):  # a home without a sequence in this step
            return kv.new_empty(0, self.wo_b.shape[0])
        table = step.csa_table if self.indexer is not None else step.hca_table
        key = WindowKey(
            kv, self.kv_norm, self.frequencies, self.eps, step.batch, state.window,
            step.window_table,
        )  # fmt: skip
        blocks = list(self._compressions(rest, latent.dtype, table, step, state))
        matrices = [self.wq_b, *([self.indexer.wq_b] if self.indexer is not None else [])]
        q, *index_q = linear_multi(norm_store(latent, self.q_norm, key, blocks), matrices)
        queries = Queries(q.view(-1, self.num_heads, self.head_dim), self.eps)
        compressed = None
        if self.indexer is not None:
            assert isinstance(state, CsaState)
            queries, selected = self.indexer(queries, index_q[0], rest[4], step, state)
            compressed = Compressed(state.entries, table, self.ratio, selected)
        elif isinstance(state, HcaState):
            compressed = Compressed(state.entries, table, self.ratio, None)
        to = Visible(
            self.sink, state.window, step.window_table, compressed, step.batch, self.window,
            self.frequencies,
        )  # fmt: skip
        out = query_attention(queries, to)
        return sharing.project(out.view(len(kv), self.num_groups, -1), self.wo_a, self.wo_b)

    def _compressions(
        self,
        projected: list[Tensor],
        dtype: torch.dtype,
        table: Tensor,
        step: StepInputs,
        state: LayerState,
    ) -> Iterator[Compression]:
        """One for the layer's compressor, one for its indexer's; `projected`: two results each."""
        if self.compressor is not None:
            assert isinstance(state, CsaState | HcaState)
            yield self.compressor.of(
                projected[:2], dtype, step.batch, state.compressor, state.entries, table
            )
        if self.indexer is not None:
            assert isinstance(state, CsaState)
            yield self.indexer.compressor.of(
                projected[2:4], dtype, step.batch, state.index_compressor, state.index, table
            )
