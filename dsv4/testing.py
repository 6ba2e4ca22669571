"""Random models for tests, benchmarks and `doctor`: every layer kind at any small size.

`small_config` is a complete V4 in miniature. `random_weights` gives every part an effect (norms,
sinks, biases and `ape` far from neutral). A *nasty* model has activations in the hundreds, nearly
tied index scores and clamps that act on most values.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.checkpoint.names import Parameter, parameters
from dsv4.config import ModelConfig


def small_config(**changes: Any) -> ModelConfig:
    """Seven layers covering all kinds, two of them hash-routed; `changes` override fields."""
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
    """Every parameter under its canonical name, in fp32; depends only on config and seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in parameters(config).items():
        weights[name] = _random_tensor(name, parameter, config, generator)
    if nasty:
        _make_nasty(weights, config.rope_head_dim, generator)
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


def _make_nasty(weights: dict[str, Tensor], rope_dim: int, generator: torch.Generator) -> None:
    for name, weight in weights.items():
        if name.endswith("indexer.compressor.norm.weight"):
            weight[-rope_dim:] *= 1e-6  # otherwise the rotation would separate the keys
        elif name.endswith("norm.weight"):  # a few channels carry values in the hundreds
            channels = torch.randperm(weight.shape[0], generator=generator)[:2]
            weight[channels] *= 200.0
        elif name.endswith("indexer.compressor.wkv.weight"):
            # index keys that differ in the last bits only: scores nearly tie
            weight.copy_(weight[:1] + 1e-6 * weight)
        elif name.endswith("w13"):
            weight *= 20.0


def as_dtype(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices in `dtype`; what the model keeps in fp32 (norms, mixing, sinks) is unchanged."""
    return {
        name: weight.to(dtype) if weight.dim() >= 2 and _may_round(name) else weight
        for name, weight in weights.items()
    }


def _may_round(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return leaf not in ("ape", "tid2eid") and not leaf.endswith("_fn")


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config in the published spelling."""
    c = config
    return {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_hash_layers": c.num_hash_layers,
        "num_nextn_predict_layers": c.num_draft_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": 1,
        "head_dim": c.head_dim,
        "qk_rope_head_dim": c.rope_head_dim,
        "q_lora_rank": c.q_lora_rank,
        "o_groups": c.o_groups,
        "o_lora_rank": c.o_lora_rank,
        "sliding_window": c.sliding_window,
        "compress_ratios": [*c.compress_ratios, *[0] * c.num_draft_layers],
        "rope_theta": c.rope_theta,
        "compress_rope_theta": c.compress_rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": c.yarn_factor,
            "original_max_position_embeddings": c.yarn_original_len,
            "beta_fast": c.yarn_beta_fast,
            "beta_slow": c.yarn_beta_slow,
        },
        "max_position_embeddings": c.max_positions,
        "index_n_heads": c.index_num_heads,
        "index_head_dim": c.index_head_dim,
        "index_topk": c.index_topk,
        "n_routed_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "n_shared_experts": 1,
        "moe_intermediate_size": c.moe_intermediate_size,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": c.routed_scaling_factor,
        "swiglu_limit": c.swiglu_limit,
        "hc_mult": c.hc_mult,
        "hc_sinkhorn_iters": c.hc_sinkhorn_iters,
        "hc_eps": c.hc_eps,
        "rms_norm_eps": c.rms_norm_eps,
        "bos_token_id": c.bos_id,
        "eos_token_id": list(c.eos_ids),
        "tie_word_embeddings": False,
        **(_dspark_json(c) if c.draft_kind == "dspark" else {}),
    }


def _dspark_json(config: ModelConfig) -> dict[str, Any]:
    d = config.dspark
    return {
        "dspark_block_size": d.block,
        "dspark_noise_token_id": d.noise_id,
        "dspark_target_layer_ids": list(d.targets),
        "dspark_markov_rank": d.rank,
    }


def official_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical weights under official names: experts one by one, gate and up separate."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith("experts"):
            tensors[name] = weight
            continue
        stacked = module.endswith(".experts")
        for number, expert in enumerate(weight if stacked else [weight]):
            prefix = f"{module}.{number}" if stacked else module
            halves = zip(("w1", "w3"), expert.chunk(2), strict=True)
            for part, matrix in halves if leaf == "w13" else [("w2", expert)]:
                tensors[f"{prefix}.{part}.weight"] = matrix.contiguous()
    return tensors


def write_checkpoint(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """An unquantised checkpoint under official names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=2) + "\n")
    save_file(official_tensors(weights), folder / "model.safetensors")
