"""One small random model under its official names, as numpy arrays. Written from the spec."""

from typing import Any

import numpy as np

Model = dict[str, np.ndarray]

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "max_position_embeddings": 4096,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,  # no multiple of the FP8 tile, so that joined halves misalign
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FP32_NAMES = ("hc_", "attn_sink", "ape", "gate.bias")
FP8_LINEARS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


def is_expert(name: str) -> bool:
    return ".ffn.experts." in name


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def is_fp8_linear(name: str) -> bool:
    """Linears that the official files store as FP8: not the compressor's, not the router's."""
    module = name.removesuffix(".weight").split(".")
    return name.endswith(".weight") and module[-1] in FP8_LINEARS and "compressor" not in module


def is_any_linear(name: str) -> bool:
    """Every linear of a ModelOpt-everything file: the compressor and the indexer too."""
    extra = ("compressor.wkv.weight", "compressor.wgate.weight", "weights_proj.weight")
    return is_fp8_linear(name) or name.endswith(extra)


def random_model(seed: int = 0, draft: bool = True, config: dict[str, Any] = CONFIG) -> Model:
    rng = np.random.default_rng(seed)
    c = config
    d, v = c["hidden_size"], c["vocab_size"]
    model: Model = {}

    def normal(name: str, *shape: int, std: float = 0.05) -> None:
        model[name] = (rng.standard_normal(shape) * std).astype(np.float32)

    def norm(name: str, size: int) -> None:
        model[name] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    normal("embed.weight", v, d, std=1.0)
    normal("head.weight", v, d)
    norm("norm.weight", d)
    _mix(normal, "hc_head", c["hc_mult"], c["hc_mult"] * d, 1)
    for layer in range(c["num_hidden_layers"]):
        ratio = c["compress_ratios"][layer]
        _block(rng, normal, norm, model, f"layers.{layer}.", ratio, c, layer)
    if draft:
        _block(rng, normal, norm, model, "mtp.0.", 0, c, c["num_hash_layers"])
        for name in ("e_proj", "h_proj"):
            normal(f"mtp.0.{name}.weight", d, d)
        for name in ("enorm", "hnorm", "norm"):
            norm(f"mtp.0.{name}.weight", d)
        _mix(normal, "mtp.0.hc_head", c["hc_mult"], c["hc_mult"] * d, 1)
    for name in model:  # what is stored in BF16 has BF16 values from the start
        if not name.endswith("tid2eid") and not any(part in name for part in FP32_NAMES):
            model[name] = bf16(model[name])
    return model


def _mix(normal: Any, prefix: str, rows: int, width: int, scales: int) -> None:
    normal(f"{prefix}_fn", rows, width)
    normal(f"{prefix}_base", rows, std=0.5)
    normal(f"{prefix}_scale", scales, std=1.0)


def _block(
    rng: Any, normal: Any, norm: Any, model: Model, p: str, ratio: int, c: dict, layer: int
) -> None:
    d, heads, n = c["hidden_size"], c["num_attention_heads"], c["hc_mult"]
    hd, q, inter = c["head_dim"], c["q_lora_rank"], c["moe_intermediate_size"]
    low = c["o_groups"] * c["o_lora_rank"]
    for name in ("attn_norm", "ffn_norm"):
        norm(f"{p}{name}.weight", d)
    for name in ("hc_attn", "hc_ffn"):
        _mix(normal, p + name, (2 + n) * n, n * d, 3)
    normal(f"{p}attn.wq_a.weight", q, d)
    norm(f"{p}attn.q_norm.weight", q)
    normal(f"{p}attn.wq_b.weight", heads * hd, q, std=0.2)
    normal(f"{p}attn.wkv.weight", hd, d)
    norm(f"{p}attn.kv_norm.weight", hd)
    normal(f"{p}attn.attn_sink", heads, std=1.0)
    normal(f"{p}attn.wo_a.weight", low, heads * hd // c["o_groups"], std=0.1)
    normal(f"{p}attn.wo_b.weight", d, low, std=0.1)
    if ratio:
        _compressor(normal, norm, f"{p}attn.compressor.", hd, d, ratio)
    if ratio == 4:
        index = c["index_head_dim"]
        normal(f"{p}attn.indexer.wq_b.weight", c["index_n_heads"] * index, q, std=0.2)
        normal(f"{p}attn.indexer.weights_proj.weight", c["index_n_heads"], d)
        _compressor(normal, norm, f"{p}attn.indexer.compressor.", index, d, ratio)
    experts, top = c["n_routed_experts"], c["num_experts_per_tok"]
    normal(f"{p}ffn.gate.weight", experts, d)
    if layer < c["num_hash_layers"]:
        rows = [rng.permutation(experts)[:top] for _ in range(c["vocab_size"])]
        model[f"{p}ffn.gate.tid2eid"] = np.stack(rows).astype(np.int64)
    else:
        normal(f"{p}ffn.gate.bias", experts, std=0.1)
    for prefix in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
        normal(f"{p}ffn.{prefix}.w1.weight", inter, d)
        normal(f"{p}ffn.{prefix}.w3.weight", inter, d)
        normal(f"{p}ffn.{prefix}.w2.weight", d, inter)


def _compressor(normal: Any, norm: Any, p: str, width: int, d: int, ratio: int) -> None:
    wide = 2 * width if ratio == 4 else width
    normal(f"{p}wkv.weight", wide, d)
    normal(f"{p}wgate.weight", wide, d)
    normal(f"{p}ape", ratio, wide, std=0.5)
    norm(f"{p}norm.weight", width)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest BF16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)
