"""ModelConfig from every spelling, every kind of bad field, EngineConfig, and the settings."""

import copy
import json
import logging
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV4Config

from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, ConfigError, Dsv4Error, OptionError
from dsv4.runner.settings import DEFAULT_SEQUENCES, resolve
from dsv4.testing import config_json, small_config
from tests.oracle.reference import transformers_config

# The published values, typed in from the model's specification (table 2.1), not from our code.
FLASH_RATIOS = [0, 0] + [4 if layer % 2 == 0 else 128 for layer in range(2, 43)]
PRO_RATIOS = [128, 128] + [4 if layer % 2 == 0 else 128 for layer in range(2, 61)]
COMMON = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "expert_dtype": "fp4",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FLASH: dict[str, Any] = {
    **COMMON,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "compress_ratios": [*FLASH_RATIOS, 0],
    "index_topk": 512,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
}
PRO: dict[str, Any] = {
    **COMMON,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [*PRO_RATIOS, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
# The reference program's own spelling of Flash.
SHORT_FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 4096,
    "moe_inter_dim": 2048,
    "n_layers": 43,
    "n_hash_layers": 3,
    "n_mtp_layers": 1,
    "n_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "norm_eps": 1e-6,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "compress_ratios": [*FLASH_RATIOS, 0],
    "original_seq_len": 65536,
    "rope_theta": 10000.0,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "compress_rope_theta": 160000.0,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "dtype": "fp8",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


# --- good configs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "published"), [("flash", FLASH), ("pro", PRO)])
def test_builtins_hold_the_published_values(name: str, published: dict[str, Any]) -> None:
    built = ModelConfig.builtin(name)
    assert built == ModelConfig.from_dict(published)
    # and the fields themselves, so that a wrong default cannot hide behind the reader
    assert built.hidden_size == published["hidden_size"]
    assert built.num_layers == published["num_hidden_layers"]
    assert list(built.compress_ratios) == published["compress_ratios"][:-1]
    assert built.num_heads == published["num_attention_heads"]
    assert built.num_experts == published["n_routed_experts"]
    assert built.moe_intermediate_size == published["moe_intermediate_size"]
    assert built.index_topk == published["index_topk"]
    assert (built.yarn_factor, built.yarn_original_len) == (16.0, 65536)
    assert (built.rope_theta, built.compress_rope_theta) == (10000.0, 160000.0)
    assert built.nope_head_dim == 448
    assert built.mix_rows == 24
    assert built.num_draft_layers == 1


def test_layer_kinds_of_the_published_models() -> None:
    flash, pro = ModelConfig.builtin("flash"), ModelConfig.builtin("pro")
    assert [flash.num_layers_of(kind) for kind in ("swa", "csa", "hca")] == [2, 21, 20]
    assert [pro.num_layers_of(kind) for kind in ("swa", "csa", "hca")] == [0, 30, 31]
    assert flash.kinds[42] == "csa"


def test_unknown_builtin() -> None:
    with pytest.raises(OptionError, match="flash"):
        ModelConfig.builtin("mini")


def test_the_three_spellings_agree(tmp_path: Path) -> None:
    published = ModelConfig.from_dict(FLASH)
    assert ModelConfig.from_dict(SHORT_FLASH) == published
    assert published == ModelConfig.builtin("flash")
    transformers_config(published).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "layer_types" in saved
    assert "mlp_layer_types" in saved
    assert "compress_ratios" not in saved
    assert ModelConfig.from_folder(tmp_path) == published


@pytest.mark.parametrize("changes", [{}, {"yarn_factor": 1.0}, {"num_hash_layers": 0}])
def test_a_small_config_survives_both_spellings(changes: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(**changes)
    assert ModelConfig.from_dict(config_json(config)) == config
    transformers_config(config).save_pretrained(tmp_path)
    loaded = ModelConfig.from_folder(tmp_path)
    # without YaRN the original length has no meaning and is not saved
    same = replace(loaded, yarn_original_len=config.yarn_original_len)
    assert same == config


def test_transformers_own_defaults_are_read(tmp_path: Path) -> None:
    DeepseekV4Config().save_pretrained(tmp_path)
    loaded = ModelConfig.from_folder(tmp_path)
    assert loaded.hidden_size == 4096
    assert loaded.yarn_factor == 1.0
    assert loaded.compress_ratios[:4] == (128, 128, 128, 4)


def test_dspark_stages_are_counted_from_the_ratios() -> None:
    data = {**FLASH, "dspark_block_size": 5, "compress_ratios": [*FLASH_RATIOS, 0, 0, 0]}
    config = ModelConfig.from_dict(data)
    assert (config.draft_kind, config.num_draft_layers) == ("dspark", 3)
    assert ModelConfig.from_dict(FLASH).draft_kind == "mtp"


def test_unknown_fields_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ModelConfig.from_dict({**FLASH, "frobnicate": 3})
    assert "frobnicate" in caplog.text


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig.builtin("flash").hidden_size = 1  # type: ignore[misc]


# --- bad configs ----------------------------------------------------------------------------

REQUIRED_INTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
)
REQUIRED_FLOATS = ("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps")
NAME_OF_FIELD = {  # the message may name our field where it has another name
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "index_n_heads": "index_num_heads",
    "n_routed_experts": "num_experts",
}


def refused(data: dict[str, Any], *names: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    message = str(caught.value)
    assert any(name in message for name in names), message
    return message


@pytest.mark.parametrize("name", REQUIRED_INTS)
def test_bad_integers_are_refused_by_name(name: str) -> None:
    missing = {key: value for key, value in FLASH.items() if key != name}
    assert "missing" in refused(missing, name)
    for bad in ("4", 4.5, True, [4], None):
        refused({**FLASH, name: bad}, name)
    for bad in (0, -1, 10**30, 10**400):
        refused({**FLASH, name: bad}, name, NAME_OF_FIELD.get(name, name), "entries")


@pytest.mark.parametrize("name", REQUIRED_FLOATS)
def test_bad_numbers_are_refused_by_name(name: str) -> None:
    missing = {key: value for key, value in FLASH.items() if key != name}
    assert "missing" in refused(missing, name)
    for bad in ("1", True, None, {}):
        refused({**FLASH, name: bad}, name)
    for bad in (0.0, -1.0, float("nan"), float("inf"), 10**400):
        refused({**FLASH, name: bad}, name)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"compress_ratios": None, "layer_types": None}, "compress_ratios"),
        ({"compress_ratios": "0,4"}, "compress_ratios"),
        ({"compress_ratios": FLASH_RATIOS[:-1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0.0, *FLASH_RATIOS[2:]]}, "compress_ratios"),
        ({"compress_ratios": [0, True, *FLASH_RATIOS[2:]]}, "compress_ratios"),
        ({"compress_ratios": [0, 8, *FLASH_RATIOS[2:], 0]}, "compress_ratios[1]"),
        ({"compress_ratios": [*FLASH_RATIOS, 4]}, "compress_ratios"),
        ({"num_hash_layers": 44}, "num_hash_layers"),
        ({"num_hash_layers": -1}, "num_hash_layers"),
        ({"num_hash_layers": "3"}, "num_hash_layers"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 514}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 256}, "index_head_dim"),
        ({"qk_rope_head_dim": "64"}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"index_head_dim": 96}, "index_head_dim"),
        ({"o_groups": 7}, "o_groups"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"bos_token_id": 129280}, "bos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"eos_token_id": [1, 129280]}, "eos_token_id"),
        ({"eos_token_id": list(range(65))}, "eos_token_id"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"max_position_embeddings": None, "max_seq_len": "long"}, "max_seq_len"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"compress_rope_theta": 0.5}, "compress_rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": {**COMMON["rope_scaling"], "factor": 0.5}}, "factor"),
        ({"rope_scaling": {**COMMON["rope_scaling"], "factor": None}}, "factor"),
        ({"rope_scaling": {**COMMON["rope_scaling"], "attention_factor": 1.3}}, "attention_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**COMMON["rope_scaling"], "beta_fast": "32"}}, "beta_fast"),
        ({"rope_parameters": ["main"], "rope_scaling": None}, "rope_parameters"),
        ({"rope_parameters": {"main": 3}, "rope_scaling": None}, "rope_parameters"),
        ({"rope_parameters": {"main": {"rope_type": "yarn"}}}, "rope_parameters.main"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_contradictions_are_refused_by_name(change: dict[str, Any], name: str) -> None:
    data = {**FLASH, **change}
    refused({key: value for key, value in data.items() if value is not None}, name)


def spelled_by_transformers() -> dict[str, Any]:
    return copy.deepcopy(transformers_config(small_config()).to_dict())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("layer_types", ["sliding_attention"], "layer_types"),
        ("layer_types", "sliding_attention", "layer_types"),
        ("layer_types", ["full_attention"] * 7, "layer_types[0]"),
        ("layer_types", [["sliding_attention"]] * 7, "layer_types[0]"),
        ("mlp_layer_types", ["moe"] * 6, "mlp_layer_types"),
        ("mlp_layer_types", ["moe"] * 6 + ["hash_moe"], "mlp_layer_types"),
        ("mlp_layer_types", ["dense"] + ["moe"] * 6, "mlp_layer_types[0]"),
        ("compress_rates", {"compressed_sparse_attention": 8}, "compress_rates"),
        ("compress_rates", "4", "compress_rates"),
    ],
)
def test_bad_layer_lists_of_transformers(name: str, value: Any, says: str) -> None:
    data = spelled_by_transformers()
    ModelConfig.from_dict(data)
    refused({**data, name: value}, says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "deepseek_v41"}, ("deepseek_v41", "V4.1", "Engram")),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, ("deepseek_v41",)),
        ({"architectures": 5}, ("architectures",)),
        ({"engram_layer_ids": [1, 14]}, ("deepseek_v41",)),
        ({"vision_config": {"depth": 32}}, ("vision",)),
        ({"architectures": ["DeepseekV4VisionForConditionalGeneration"]}, ("vision",)),
        ({"model_type": "deepseek_v3"}, ("deepseek_v3", "deepseek_v4")),
        ({"model_type": "llama"}, ("llama", "deepseek_v4")),
        ({"model_type": 4}, ("'4'", "deepseek_v4")),
    ],
)
def test_other_models_are_refused_by_name(change: dict[str, Any], says: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict({**FLASH, **change})
    for word in says:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": ', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object"),
        (b"{}", "missing"),
    ],
)
def test_broken_files(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert says in str(caught.value)
    assert "config.json" in str(caught.value)


def test_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        ModelConfig.from_folder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelConfig.from_folder(tmp_path)


# --- the user's choices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"device": "cpu:1"}, "device"),
        ({"device": "auto:1"}, "device"),
        ({"device": None}, "device"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": 32}, "dtype"),
        ({"kv_format": "fp4"}, "kv_format"),
        ({"index_format": "int8"}, "index_format"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": 1.5}, "max_context"),
        ({"max_context": True}, "max_context"),
        ({"max_sequences": -1}, "max_sequences"),
        ({"chunk_tokens": "64"}, "chunk_tokens"),
        ({"prefix_cache": "no"}, "prefix_cache"),
        ({"cuda_graphs": 1}, "cuda_graphs"),
        ({"ops": None}, "ops"),
        ({"kv_fromat": "fp8"}, "kv_fromat"),
    ],
)
def test_bad_choices_are_refused_by_name(choices: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError) as caught:
        EngineConfig.make(**choices)
    assert name in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_choice_lists_the_known_ones() -> None:
    with pytest.raises(OptionError) as caught:
        EngineConfig.make(kvformat="fp8")
    for item in fields(EngineConfig):
        assert item.name in str(caught.value)


GIB = 2**30
FLASH_CONFIG = ModelConfig.builtin("flash")


def test_auto_on_a_cpu() -> None:
    settings = resolve(EngineConfig(), FLASH_CONFIG, has_gpu=False, memory_bytes=1000 * GIB)
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert (settings.kv_format, settings.index_format) == ("fp32", "fp32")
    assert settings.cuda_graphs is False
    assert settings.max_sequences == DEFAULT_SEQUENCES
    assert settings.max_context <= FLASH_CONFIG.max_positions
    assert settings.chunk_tokens <= settings.max_context


def test_auto_on_a_gpu() -> None:
    settings = resolve(EngineConfig(), FLASH_CONFIG, has_gpu=True, memory_bytes=1000 * GIB)
    assert (settings.device, settings.dtype) == ("cuda", "bfloat16")
    assert (settings.kv_format, settings.index_format) == ("fp8", "fp8")
    assert settings.cuda_graphs is True


def test_choices_win_over_auto() -> None:
    chosen: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16",
        "kv_format": "bf16",
        "index_format": "fp4",
        "max_context": 500,
        "max_sequences": 3,
        "chunk_tokens": 77,
        "prefix_cache": False,
        "ops": "reference",
    }
    config = EngineConfig.make(**chosen)
    settings = resolve(config, FLASH_CONFIG, has_gpu=True, memory_bytes=1000 * GIB)
    for name, value in chosen.items():
        assert getattr(settings, name) == value
    text = str(settings)
    assert "kv_format=bf16" in text
    assert "max_context=500" in text


def test_resolving_is_pure() -> None:
    first = resolve(EngineConfig(), FLASH_CONFIG, has_gpu=False, memory_bytes=10 * GIB)
    assert first == resolve(EngineConfig(), FLASH_CONFIG, has_gpu=False, memory_bytes=10 * GIB)


def test_no_gpu_here() -> None:
    for device in ("cuda", "cuda:1"):
        choices = EngineConfig(device=device)
        with pytest.raises(OptionError, match="no GPU"):
            resolve(choices, FLASH_CONFIG, has_gpu=False, memory_bytes=GIB)


def test_context_beyond_the_model() -> None:
    config = small_config()
    choices = EngineConfig(max_context=config.max_positions + 1)
    with pytest.raises(OptionError, match="max_context"):
        resolve(choices, config, has_gpu=False, memory_bytes=GIB)


@pytest.mark.parametrize("memory_mib", [64, 256, 1024, 8192])
def test_defaults_shrink_until_they_fit(memory_mib: int) -> None:
    config = small_config(max_positions=100_000, num_layers=7, head_dim=512, rope_head_dim=16)
    memory = memory_mib * 2**20
    settings = resolve(EngineConfig(), config, has_gpu=False, memory_bytes=memory)
    geometry = settings.geometry(config)
    assert geometry.state_bytes(settings.max_context, settings.max_sequences) <= memory
    # and no further: the next larger step would not have fitted, or is the default already
    if settings.max_sequences < DEFAULT_SEQUENCES:
        assert geometry.state_bytes(settings.max_context, settings.max_sequences * 2) > memory


def test_not_enough_memory() -> None:
    with pytest.raises(CapacityError) as caught:
        resolve(EngineConfig(), FLASH_CONFIG, has_gpu=False, memory_bytes=1000)
    for word in ("B are free", "max_context", "max_sequences", "kv_format"):
        assert word in str(caught.value)


def test_a_users_choice_is_never_lowered() -> None:
    choices = EngineConfig(max_context=100_000, max_sequences=4)
    with pytest.raises(CapacityError):
        resolve(choices, FLASH_CONFIG, has_gpu=False, memory_bytes=GIB)


def test_every_error_is_ours() -> None:
    assert issubclass(ConfigError, Dsv4Error)
    assert (ConfigError.exit_code, OptionError.exit_code) == (1, 2)


def test_several_ids_may_end_an_answer() -> None:
    assert ModelConfig.from_dict({**FLASH, "eos_token_id": [1, 128799, 1]}).eos_ids == (1, 128799)
    assert ModelConfig.from_dict({**FLASH, "eos_token_id": None}).eos_ids == (1,)


def test_a_hash_layer_after_a_scored_one_is_refused_with_the_reason() -> None:
    types = ["hash_moe", "moe", "hash_moe", *["moe"] * 40]
    with pytest.raises(ConfigError, match=r"mlp_layer_types\[2\].*come first"):
        ModelConfig.from_dict({**FLASH, "mlp_layer_types": types})


@pytest.mark.parametrize(("given", "warned"), [({}, True), ({"attention_factor": 1.0}, False)])
def test_a_nested_yarn_without_its_attention_factor_is_warned_of(
    given: dict[str, float], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers would multiply by 1.277 there; DeepSeek-V4 does not."""
    yarn = {**COMMON["rope_scaling"], "rope_type": "yarn", "rope_theta": 160000.0, **given}
    nested = {"main": {"rope_type": "default", "rope_theta": 10000.0}, "compress": yarn}
    data = {**{k: v for k, v in FLASH.items() if k != "rope_scaling"}, "rope_parameters": nested}
    assert ModelConfig.from_dict(data).yarn_factor == COMMON["rope_scaling"]["factor"]
    assert ("attention_factor" in caplog.text) == warned


@pytest.mark.parametrize("field", [item.name for item in fields(ModelConfig) if item.type is int])
def test_every_number_is_bounded(field: str) -> None:
    """`n_routed_experts: 1e8` cost 41 seconds and 12 GB."""
    with pytest.raises(ConfigError, match=f"{field} is 10000000000, expected at most"):
        ModelConfig(**{field: 10**10})


def test_experts_are_bounded_over_all_layers() -> None:
    with pytest.raises(ConfigError, match="43 layers of 8192 experts"):
        ModelConfig(num_experts=8192)


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" + "0," * (9 << 20) + "0]")
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        ModelConfig.from_folder(tmp_path)
