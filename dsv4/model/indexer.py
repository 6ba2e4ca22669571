"""The indexer of a ratio-4 layer: which compressed entries a token attends to."""

from torch import Tensor

from dsv4.cache.kinds import CsaState
from dsv4.config import ModelConfig
from dsv4.model.compressor import Compressor
from dsv4.model.inputs import StepInputs
from dsv4.model.weights import Weights
from dsv4.ops.attention.index import index_scores, index_select
from dsv4.ops.attention.query import index_query


class Indexer:
    def __init__(self, config: ModelConfig, frequencies: Tensor, weights: Weights) -> None:
        self.num_heads = config.index_num_heads
        self.topk = config.index_topk
        self.scale = config.index_head_dim**-0.5 * config.index_num_heads**-0.5
        self.frequencies = frequencies
        self.wq_b = weights.take("wq_b.weight")
        self.weights_proj = weights.take("weights_proj.weight")
        self.compressor = Compressor(config, 4, frequencies, weights.under("compressor."))

    def select(self, q: Tensor, head_weights: Tensor, step: StepInputs, state: CsaState) -> Tensor:
        """`q` `[tokens, heads * dim]` and `head_weights` `[tokens, heads]` (fp32), as projected."""
        batch = step.batch
        q = q.view(q.shape[0], self.num_heads, -1)
        q = index_query(q, batch.positions, self.frequencies, state.index.format)
        scores = index_scores(
            q, head_weights * self.scale, state.index, step.csa_table, batch, self.topk
        )
        return index_select(scores, self.topk)
