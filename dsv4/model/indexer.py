"""The indexer of a ratio-4 layer: which compressed entries a token attends to."""

from torch import Tensor

from dsv4.cache.kinds import CsaState
from dsv4.config import ModelConfig
from dsv4.model.compressor import Compressor
from dsv4.model.inputs import StepInputs
from dsv4.model.weights import Weights
from dsv4.ops.attention.index import CHOOSE, index_scores, index_select
from dsv4.ops.attention.query import QUERIES, index_query
from dsv4.ops.op import Arguments


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

    def prepare(
        self, q: Tensor, index_q: Tensor, head_weights: Tensor, step: StepInputs, state: CsaState
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Attention's queries `[tokens, heads, dim]`, the index queries and the weights of their
        heads (fp32), all as projected -> as they are used; None where attention is to prepare its
        own."""
        positions = step.batch.positions
        index_q = index_q.view(index_q.shape[0], self.num_heads, -1)
        query: Arguments = {
            "q": q,
            "positions": positions,
            "frequencies": self.frequencies,
            "eps": self.eps,
        }
        index: Arguments = {
            "q": index_q,
            "positions": positions,
            "frequencies": self.frequencies,
            "index_format": state.index.format,
        }
        together = {"query": query, "index": index, "weights": head_weights, "scale": self.scale}
        if QUERIES.accepts(q.device, together):
            fused: tuple[Tensor, Tensor, Tensor] = QUERIES.run(together)
            return fused
        return None, index_query(**index), head_weights * self.scale

    def select(self, q: Tensor, weights: Tensor, step: StepInputs, state: CsaState) -> Tensor:
        """`q` `[tokens, heads, dim]` and `weights` `[tokens, heads]`, prepared -> `selected`."""
        places: Arguments = {
            "q": q,
            "weights": weights,
            "pool": state.index,
            "table": step.csa_table,
            "batch": step.batch,
            "topk": self.topk,
        }
        if CHOOSE.accepts(q.device, places):
            chosen: Tensor = CHOOSE.run(places)
            return chosen
        return index_select(index_scores(**places), self.topk)
