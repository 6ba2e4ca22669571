"""Random models for tests, benchmarks and `doctor`: every layer kind at any small size.

`small_config` is a complete V4 in miniature; `random_weights` fills it so that every part
matters (norms, sinks, biases and `ape` far from neutral). A *nasty* model has activations in the
hundreds, nearly tied index scores and clamps that act on most values.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint.names import Parameter, parameters
from dsv4.config import ModelConfig


def small_config(**changes: Any) -> ModelConfig:
    """Seven layers of all kinds, two hash-routed, with changes."""
    base = ModelConfig(
        vocab_size=97,
        hidden_size=64,
        num_layers=7,
        num_hash_layers=2,
        num_heads=4,
        head_dim=32,
        rope_head_dim=16,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=32,
        compress_ratios=(0, 128, 4, 128, 4, 0, 4),
        num_draft_layers=0,
        yarn_factor=16.0,
        yarn_original_len=64,
        max_positions=4096,
        index_num_heads=8,
        index_head_dim=16,
        index_topk=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
        swiglu_limit=0.7,
    )
    return replace(base, **changes)


def random_weights(config: ModelConfig, seed: int, *, nasty: bool = False) -> dict[str, Tensor]:
    """Every parameter under its canonical name, fp32, a function of config and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in parameters(config).items():
        weights[name] = _random_tensor(name, parameter, config, generator)
    if nasty:
        _make_nasty(weights, generator)
    return weights


def _random_tensor(
    name: str, parameter: Parameter, config: ModelConfig, generator: torch.Generator
) -> Tensor:
    shape = parameter.shape

    def normal(scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    if parameter.kind == "table":
        order = torch.rand(shape[0], config.num_experts, generator=generator).argsort(1)
        return order[:, : shape[1]].contiguous()
    if parameter.kind == "norm":
        return torch.rand(shape, generator=generator) + 0.5
    leaf = name.rpartition(".")[2]
    if leaf.endswith("_fn"):
        return normal(shape[-1] ** -0.5)
    if leaf.endswith("_scale"):
        return torch.rand(shape, generator=generator) + 0.5
    if leaf in ("ape", "attn_sink", "bias") or leaf.endswith("_base"):
        return normal(0.3 if leaf == "bias" else 1.0)
    if name == "embed.weight":
        return normal(1.0)
    return normal(1.5 * shape[-1] ** -0.5)


def _make_nasty(weights: dict[str, Tensor], generator: torch.Generator) -> None:
    for name, weight in weights.items():
        if name.endswith("norm.weight"):  # a few channels carry values in the hundreds
            channels = torch.randperm(weight.shape[0], generator=generator)[:2]
            weight[channels] *= 200.0
        elif name.endswith("indexer.compressor.wkv.weight"):
            # index keys that differ in the last bits only: scores nearly tie
            weight.copy_(weight[:1] + 1e-6 * weight)
        elif name.endswith("w13"):
            weight *= 20.0


def as_dtype(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices in `dtype`; what the model keeps in fp32 (norms, mixing, sinks) stays."""
    return {
        name: weight.to(dtype) if weight.dim() >= 2 and _may_round(name) else weight
        for name, weight in weights.items()
    }


def _may_round(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return leaf not in ("ape", "tid2eid") and not leaf.endswith("_fn")
