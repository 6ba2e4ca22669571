"""transformers' DeepseekV4 with the same config and the same weights: the independent oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.checkpoint.names import locate
from dsv4.config import ModelConfig
from tests.oracle.ties import Choices, TieBreaker, as_mask

LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def transformers_config(c: ModelConfig) -> DeepseekV4Config:
    share = c.rope_head_dim / c.head_dim
    compress: dict[str, Any] = {"rope_theta": c.compress_rope_theta, "partial_rotary_factor": share}
    if c.yarn_factor == 1.0:
        compress["rope_type"] = "default"
    else:
        compress.update(
            rope_type="yarn",
            factor=c.yarn_factor,
            original_max_position_embeddings=c.yarn_original_len,
            beta_fast=c.yarn_beta_fast,
            beta_slow=c.yarn_beta_slow,
            attention_factor=1.0,
        )
    return DeepseekV4Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        moe_intermediate_size=c.moe_intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        head_dim=c.head_dim,
        qk_rope_head_dim=c.rope_head_dim,
        q_lora_rank=c.q_lora_rank,
        num_experts_per_tok=c.num_experts_per_tok,
        n_routed_experts=c.num_experts,
        routed_scaling_factor=c.routed_scaling_factor,
        max_position_embeddings=c.max_positions,
        rope_theta=c.rope_theta,
        compress_rope_theta=c.compress_rope_theta,
        layer_types=[LAYER_TYPES[ratio] for ratio in c.compress_ratios],
        mlp_layer_types=["hash_moe"] * c.num_hash_layers
        + ["moe"] * (c.num_layers - c.num_hash_layers),
        hc_mult=c.hc_mult,
        hc_sinkhorn_iters=c.hc_sinkhorn_iters,
        hc_eps=c.hc_eps,
        swiglu_limit=c.swiglu_limit,
        sliding_window=c.sliding_window,
        o_groups=c.o_groups,
        o_lora_rank=c.o_lora_rank,
        index_n_heads=c.index_num_heads,
        index_head_dim=c.index_head_dim,
        index_topk=c.index_topk,
        num_nextn_predict_layers=c.num_draft_layers,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={
            "main": {
                "rope_type": "default",
                "rope_theta": c.rope_theta,
                "partial_rotary_factor": share,
            },
            "compress": compress,
        },
        attn_implementation="eager",
        experts_implementation="eager",
    )


def transformers_model(
    config: ModelConfig, weights: dict[str, torch.Tensor]
) -> DeepseekV4ForCausalLM:
    model = DeepseekV4ForCausalLM(transformers_config(config)).eval().float()
    filled = {}
    for name in model.state_dict():
        place = locate(name, "transformers")
        assert place is not None, name
        filled[name] = _pick(weights, place.module, place.suffix)
    model.load_state_dict(filled, strict=True)
    return model


def _pick(weights: dict[str, torch.Tensor], module: str, suffix: str) -> torch.Tensor:
    """A canonical tensor, or the half of a joined one that this module names."""
    for half, number in (("w1", 0), ("w3", 1)):
        if module.endswith(f"shared_experts.{half}"):
            return weights[module[: -len(half)] + "w13"].chunk(2)[number]
    if module.endswith(("experts.w13", "experts.w2")):  # the canonical stacks have no suffix
        return weights[module]
    return weights[f"{module}.{suffix}" if suffix else module]


class Reference:
    """transformers' logits and choices for some sequences."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Tensor], sequences: list[list[int]]
    ) -> None:
        model = transformers_model(config, weights)
        self.config, self.weights, self.sequences = config, weights, sequences
        self.logits: list[Tensor] = []  # [tokens, vocabulary]
        self.choices: list[Choices] = []
        for ids in sequences:
            with torch.inference_mode(), recorded_choices(model) as chosen:
                self.logits.append(model(torch.tensor([ids])).logits[0])
            self.choices.append(chosen)
        self.ties = TieBreaker(config, weights, sequences, self.choices)


@contextmanager
def recorded_choices(model: DeepseekV4ForCausalLM) -> Iterator[Choices]:
    """What transformers chooses in one forward pass over one sequence."""
    found: Choices = []

    def index(module: Any, given: Any, selected: Tensor) -> None:
        found.append(as_mask(selected[0], int(selected.max()) + 1))

    def router(module: Any, given: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(as_mask(result[2], module.num_experts))

    hooks = {"DeepseekV4Indexer": index, "DeepseekV4TopKRouter": router}
    handles = [
        module.register_forward_hook(hooks[type(module).__name__])
        for module in model.modules()
        if type(module).__name__ in hooks
    ]
    yield found
    for handle in handles:
        handle.remove()
