"""Attention of one layer. Key and value are one vector per token, shared by all heads.

All kinds look back over a window. Ratio-128 layers also see every compressed entry, ratio-4
layers the ones their indexer selects. Matrices that read the same input run as one op.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.cache.kinds import CsaState, HcaState, LayerState
from dsv4.config import ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.model.compressor import Compressor
from dsv4.model.indexer import Indexer
from dsv4.model.inputs import StepInputs
from dsv4.model.weights import Weights
from dsv4.ops.attention.attention import ATTEND, Compressed, attention
from dsv4.ops.attention.query import query_prepare
from dsv4.ops.attention.rope import rope_frequencies, yarn_frequencies
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear_multi, linear_parts
from dsv4.ops.kv.compress import CompressorState
from dsv4.ops.kv.kv_store import kv_store
from dsv4.ops.kv.pool import PagedPool
from dsv4.ops.kv.prepare import NORM_QUERIES, STATE_PREPARE, STATE_QUERIES
from dsv4.ops.norm.rms_norm import rms_norm
from dsv4.ops.op import Arguments
from dsv4.ops.parts import Parts
from dsv4.parallel import Shard


def layer_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """One table for everything a layer rotates; YaRN only where there is a compressor."""
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
    def __init__(self, config: ModelConfig, layer: int, weights: Weights, shard: Shard) -> None:
        ratio = config.compress_ratios[layer]
        self.num_heads = len(shard.split(config.num_heads, "attention heads"))
        self.num_groups = len(shard.split(config.o_groups, "output groups"))
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        self.ratio = ratio
        self.eps = config.rms_norm_eps
        self.wq_a = weights.take("wq_a.weight")
        self.q_norm = weights.tensor("q_norm.weight")
        self.wq_b = weights.take("wq_b.weight")
        self.wkv = weights.take("wkv.weight")
        self.kv_norm = weights.tensor("kv_norm.weight")
        self.sink = weights.tensor("attn_sink")
        self.wo_a = weights.take("wo_a.weight")
        self.wo_b = weights.take("wo_b.weight")
        self.frequencies = layer_frequencies(config, ratio).to(self.sink.device)
        self.compressor = self.indexer = None
        if ratio:
            under = weights.under("compressor.")
            self.compressor = Compressor(config, ratio, self.frequencies, under)
        if ratio == 4:
            self.indexer = Indexer(config, self.frequencies, weights.under("indexer."))

    def inputs(self, dtype: torch.dtype) -> Arguments:
        """The matrices that read the layer's input: query latent and window key in `dtype`, then
        what compressor and indexer need in fp32."""
        matrices: list[Weight] = [self.wq_a, self.wkv]
        if self.compressor is not None:
            matrices += self.compressor.matrices
        if self.indexer is not None:
            matrices += [*self.indexer.compressor.matrices, self.indexer.weights_proj]
        wide = [torch.float32] * (len(matrices) - 2)
        return {"weights": matrices, "out_dtypes": [dtype, dtype, *wide]}

    def __call__(
        self, projected: list[Tensor], step: StepInputs, state: LayerState
    ) -> Tensor | Parts:
        """What `inputs` gave -> `[tokens, hidden]`; writes the layer's state."""
        batch = step.batch
        latent, kv, *rest = projected
        compressed_in, index_in = rest[:2], rest[2:]
        table = step.csa_table if self.indexer is not None else step.hca_table
        q, *others = self._prepare(latent, kv, [compressed_in, index_in[:2]], table, step, state)
        q = q.view(-1, self.num_heads, self.head_dim)
        compressed = ready = None
        if self.indexer is not None:
            assert isinstance(state, CsaState)
            ready, index_q, weights = self.indexer.prepare(q, others[0], index_in[2], step, state)
            selected = self.indexer.select(index_q, weights, step, state)
            compressed = Compressed(state.entries, table, self.ratio, selected)
        elif isinstance(state, HcaState):
            compressed = Compressed(state.entries, table, self.ratio, None)
        places: Arguments = {
            "sink": self.sink,
            "pool": state.window,
            "table": step.window_table,
            "compressed": compressed,
            "batch": batch,
            "window": self.window,
            "frequencies": self.frequencies,
        }
        out = self._attend(q if ready is None else ready, places, is_prepared=ready is not None)
        grouped = grouped_linear(out.view(kv.shape[0], self.num_groups, -1), self.wo_a)
        return linear_parts(grouped, self.wo_b)

    def _attend(self, q: Tensor, places: Arguments, *, is_prepared: bool) -> Tensor:
        if is_prepared:
            return attention(q, **places)
        together = {"q": q, "eps": self.eps, **places}
        if ATTEND.accepts(q.device, together):
            fused: Tensor = ATTEND.run(together)
            return fused
        positions = places["batch"].positions
        return attention(query_prepare(q, positions, self.frequencies, self.eps), **places)

    def _prepare(
        self,
        latent: Tensor,
        kv: Tensor,
        projected: list[list[Tensor]],
        table: Tensor,
        step: StepInputs,
        state: LayerState,
    ) -> list[Tensor]:
        """The window key and what the compressors make are stored; queries come back, projected
        from the normalised latent, and the indexer's behind them. One launch and the products
        where one token for each sequence is new."""
        batch, eps, frequencies = step.batch, self.eps, self.frequencies
        norm: Arguments = {"x": latent, "weight": self.q_norm, "eps": eps}
        key: Arguments = {
            "kv": kv,
            "norm": self.kv_norm,
            "frequencies": frequencies,
            "eps": eps,
            "batch": batch,
            "pool": state.window,
            "table": step.window_table,
        }
        updates: list[tuple[Compressor, Arguments]] = []
        for compressor, inputs, held, pool in self._compressors(projected, state):
            arguments = compressor.arguments(inputs, latent.dtype, batch, held, pool, table)
            updates.append((compressor, arguments))
        matrices = [self.wq_b, *([self.indexer.wq_b] if self.indexer is not None else [])]
        queries: Arguments = {"weights": matrices, "out_dtypes": [latent.dtype] * len(matrices)}
        store: Arguments = {"norm": norm, "key": key, "blocks": [each for _, each in updates]}
        if STATE_QUERIES.accepts(latent.device, {**store, "linear": queries}):
            fused: list[Tensor] = STATE_QUERIES.run({**store, "linear": queries})
            return fused
        if STATE_PREPARE.accepts(latent.device, store):
            return linear_multi(STATE_PREPARE.run(store), **queries)
        kv_store(**key)
        for compressor, arguments in updates:
            compressor.update(arguments)
        if NORM_QUERIES.accepts(latent.device, {"norm": norm, "linear": queries}):
            fused = NORM_QUERIES.run({"norm": norm, "linear": queries})
            return fused
        return linear_multi(rms_norm(**norm), **queries)

    def _compressors(
        self, projected: list[list[Tensor]], state: LayerState
    ) -> Iterator[tuple[Compressor, list[Tensor], CompressorState, PagedPool]]:
        """Each compressor of the layer with its inputs, its state and where its entries go."""
        if self.compressor is not None:
            assert isinstance(state, CsaState | HcaState)
            yield self.compressor, projected[0], state.compressor, state.entries
        if self.indexer is not None:
            assert isinstance(state, CsaState)
            yield self.indexer.compressor, projected[1], state.index_compressor, state.index
