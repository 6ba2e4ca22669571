"""The feed-forward half of a block: a router, its experts, and the shared expert."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.exchange import SingleRank
from dsv4.model.weights import Weights
from dsv4.ops.mhc.mix import MixSite, Residual
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.placed import PlacedExperts
from dsv4.ops.moe.router import Gate


class MoE:
    def __init__(self, config: ModelConfig, weights: Weights, *, hashed: bool) -> None:
        self.gate = Gate(
            gate=weights.tensor("gate.weight"),
            bias=None if hashed else weights.tensor("gate.bias"),
            table=weights.tensor("gate.tid2eid") if hashed else None,
            num_chosen=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
        )
        self.experts = Experts(
            w13=weights.take("experts.w13"),
            w2=weights.take("experts.w2"),
            shared_w13=weights.take("shared_experts.w13"),
            shared_w2=weights.take("shared_experts.w2"),
            limit=config.swiglu_limit,
        )

    def __call__(
        self, residual: Residual, site: MixSite, token_ids: Tensor, sharing: SingleRank
    ) -> Residual:
        """Collapse the streams at `site`, then run router and experts."""
        with self._around():
            return sharing.experts(residual, site, token_ids, (self.gate, self.experts))

    def _around(self) -> AbstractContextManager[None]:
        """With placed experts, a step may have staged some of this layer's in GPU buffers."""
        w13 = self.experts.w13
        return w13.table.around_layer() if isinstance(w13, PlacedExperts) else nullcontext()
