"""The feed-forward half of a block: a router, its experts, and one expert that always runs."""

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.weights import Weights
from dsv4.ops.moe.experts import MOE, experts_ffn
from dsv4.ops.moe.router import router
from dsv4.ops.op import Arguments
from dsv4.ops.parts import Parts


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

    def arguments(self, token_ids: Tensor) -> dict[str, Arguments]:
        """Of both ops, but for the input."""
        choice: Arguments = {
            "gate": self.gate,
            "bias": self.bias,
            "table": self.table,
            "token_ids": token_ids,
            "num_chosen": self.num_chosen,
            "scaling": self.scaling,
        }
        matrices: Arguments = {
            "w13": self.w13,
            "w2": self.w2,
            "shared_w13": self.shared_w13,
            "shared_w2": self.shared_w2,
            "limit": self.limit,
        }
        return {"router": choice, "experts": matrices}

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor | Parts:
        together = self.arguments(token_ids)
        together["router"]["x"] = x
        if MOE.accepts(x.device, together):
            fused: Parts = MOE.run(together)
            return fused
        experts, weights = router(**together["router"])
        return experts_ffn(x, experts, weights, **together["experts"])
