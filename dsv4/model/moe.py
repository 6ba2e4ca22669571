"""The feed-forward half of a block: a router, its experts, and one expert that always runs."""

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.weights import Weights
from dsv4.ops.moe.experts import experts_ffn
from dsv4.ops.moe.router import router


class MoE:
    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        self.num_chosen = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.limit = config.swiglu_limit
        self.gate = weights.tensor("gate.weight")
        hashed = layer < config.num_hash_layers
        self.table = weights.tensor("gate.tid2eid") if hashed else None
        self.bias = None if hashed else weights.tensor("gate.bias")
        self.w13 = weights.take("experts.w13")
        self.w2 = weights.take("experts.w2")
        self.shared_w13 = weights.take("shared_experts.w13")
        self.shared_w2 = weights.take("shared_experts.w2")

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        experts, weights = router(
            x, self.gate, self.bias, self.table, token_ids, self.num_chosen, self.scaling
        )
        return experts_ffn(
            x,
            experts,
            weights,
            self.w13,
            self.w2,
            self.shared_w13,
            self.shared_w2,
            self.limit,
        )
