"""What transformers' `save_pretrained` writes, in both of its spellings, equals its state."""

from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import ModelConfig
from tests.checkpoint import tiny


@pytest.fixture(scope="module")
def oracle() -> DeepseekV4ForCausalLM:
    fields = {k: v for k, v in tiny.CONFIG.items() if k not in ("architectures", "model_type")}
    fields["num_nextn_predict_layers"] = 0
    fields["compress_ratios"] = fields["compress_ratios"][:4]
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields))
    generator = torch.Generator().manual_seed(1)
    for name, value in model.state_dict().items():
        if value.dtype == torch.int64:
            rows = [torch.randperm(4, generator=generator)[:2] for _ in range(value.shape[0])]
            value.copy_(torch.stack(rows))
        else:
            value.copy_(torch.randn(value.shape, generator=generator))
        assert value.numel(), name
    return model


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("shard_size", ["200KB", "1GB"])
def test_save_pretrained_is_read_back(oracle, original_format, shard_size, tmp_path: Path) -> None:
    oracle.save_pretrained(
        tmp_path, save_original_format=original_format, max_shard_size=shard_size
    )
    checkpoint = open_checkpoint(tmp_path, ModelConfig.from_folder(tmp_path))
    assert checkpoint.manifest.family == ("hybrid" if original_format else "transformers")
    loaded = checkpoint.load()
    state = oracle.state_dict()
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "hc_head_fn": "model.hc_head.hc_fn",
        "layers.1.attn.kv_norm.weight": "model.layers.1.self_attn.kv_norm.weight",
        "layers.1.attn.q_norm.weight": "model.layers.1.self_attn.q_a_norm.weight",
        "layers.1.attn.attn_sink": "model.layers.1.self_attn.sinks",
        "layers.2.attn.compressor.ape": "model.layers.2.self_attn.compressor.position_bias",
        "layers.3.attn.indexer.compressor.wgate.weight": (
            "model.layers.3.self_attn.compressor.indexer.gate_proj.weight"
        ),
        "layers.3.attn.indexer.weights_proj.weight": (
            "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight"
        ),
        "layers.0.ffn.gate.tid2eid": "model.layers.0.mlp.gate.tid2eid",
        "layers.1.ffn.gate.bias": "model.layers.1.mlp.gate.e_score_correction_bias",
        "layers.1.ffn.experts.w13": "model.layers.1.mlp.experts.gate_up_proj",
        "layers.1.ffn.experts.w2": "model.layers.1.mlp.experts.down_proj",
        "layers.1.ffn.shared_experts.w2": "model.layers.1.mlp.shared_experts.down_proj.weight",
        "layers.2.hc_ffn_scale": "model.layers.2.ffn_hc.scale",
    }
    for name, theirs in pairs.items():
        assert torch.equal(loaded[name].double(), state[theirs].double()), name
    joined = loaded["layers.2.ffn.shared_experts.w13"]
    gate = state["model.layers.2.mlp.shared_experts.gate_proj.weight"]
    assert torch.equal(joined[:96], gate)
    elements = sum(value.numel() for value in state.values())
    assert sum(value.numel() for value in loaded.values()) == elements
