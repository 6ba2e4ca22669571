"""The indexer of a ratio-4 layer: which compressed entries a token attends to."""

from torch import Tensor

from dsv4.cache.kinds import CsaState
from dsv4.config import ModelConfig
from dsv4.model.compressor import Compressor
from dsv4.model.inputs import StepInputs
from dsv4.model.weights import Weights
from dsv4.ops.attention.index import IndexEntries, index_scores, index_select
from dsv4.ops.attention.query import Queries
from dsv4.ops.fused.block import prepare_queries


class Indexer:
    def __init__(self, config: ModelConfig, frequencies: Tensor, weights: Weights) -> None:
        self.num_heads = config.index_num_heads
        self.topk = config.index_topk
        self.scale = config.index_head_dim**-0.5 * config.index_num_heads**-0.5
        self.eps = config.rms_norm_eps
        self.frequencies = frequencies
        self.wq_b = weights.take("wq_b.weight")
        self.weights_proj = weights.take("weights_proj.weight")
        self.compressor = Compressor(config, 4, frequencies, weights.under("compressor."))

    def __call__(
        self,
        queries: Queries,
        index_q: Tensor,
        head_weights: Tensor,
        step: StepInputs,
        state: CsaState,
    ) -> tuple[Queries, Tensor]:
        """Projected attention queries, index queries `[tokens, heads * dim]` and index head weights
        (fp32) -> the attention queries, possibly prepared, and the selection."""
        queries, index_q, weights = prepare_queries(
            queries,
            index_q.view(index_q.shape[0], self.num_heads, -1),
            head_weights,
            self.scale,
            step.batch.positions,
            self.frequencies,
            state.index.format,
        )
        to = IndexEntries(state.index, step.csa_table, step.batch, self.topk)
        return queries, index_select(index_scores(index_q, weights, to), self.topk)
