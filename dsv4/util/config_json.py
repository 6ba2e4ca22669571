"""The three spellings of `config.json`, read into the field values of ModelConfig.

The published spelling has `compress_ratios`, `num_hash_layers` and `rope_scaling`; transformers
writes `layer_types`, `mlp_layer_types` and `rope_parameters`; the reference program's short
config has `dim`, `n_layers` and so on and is translated first.
"""

import logging
from collections.abc import Mapping
from typing import Any

from dsv4.errors import ConfigError
from dsv4.util.draft_shape import read_drafter

log = logging.getLogger(__name__)

MAX_EOS_IDS = 64
RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}

# the reference program's short names, translated before anything else is read
_SHORT_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
}
_SHORT_ROPE = {
    "rope_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}

# config.json name -> field, for values that are copied unchanged
_INT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "sliding_window",
    "index_n_heads": "index_num_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
}
_FLOAT_FIELDS = {
    "routed_scaling_factor": "routed_scaling_factor",
    "swiglu_limit": "swiglu_limit",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "rms_norm_eps",
}
# absent means this value, the only one in this family; any other value is a different model
_FIXED = {
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc", None),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "tie_word_embeddings": (False,),
}
# read elsewhere (formats, chat) or irrelevant for inference
_IGNORED = frozenset(
    (
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "quantization_config",
        "expert_dtype",
        "scale_fmt",
        "max_batch_size",
        "max_seq_len",
        "pad_token_id",
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "num_local_experts",
        "intermediate_size",
        "default_theta",
        "rope_type",
        "n_group",
        "topk_group",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
        "partial_rotary_factor",
        "qk_rope_head_dim",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "compress_ratios",
        "compress_rates",
        "compress_rate_csa",
        "compress_rate_hca",
        "layer_types",
        "mlp_layer_types",
        "num_hash_layers",
        "num_nextn_predict_layers",
        "rope_theta",
        "compress_rope_theta",
        "rope_scaling",
        "rope_parameters",
        "ignore_keys_at_rope_validation",
    )
)


class _ConfigReader:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)
        if "dim" in self.data and "hidden_size" not in self.data:
            self.data = self._translate_short()
        self._refuse_other_models()

    def _translate_short(self) -> dict[str, Any]:
        data = {_SHORT_NAMES.get(key, key): value for key, value in self.data.items()}
        rope = {long: data.pop(short) for short, long in _SHORT_ROPE.items() if short in data}
        if rope:
            data["rope_scaling"] = {"type": "yarn", **rope}
        return data

    def _refuse_other_models(self) -> None:
        found = str(self.data.get("model_type", "deepseek_v4"))
        listed = self.data.get("architectures") or []
        if not isinstance(listed, list):
            raise ConfigError(f"architectures is {listed!r}, expected a list of names")
        architectures = " ".join(map(str, listed))
        if "v41" in (found + architectures).lower() or "engram_layer_ids" in self.data:
            raise ConfigError(
                "model_type 'deepseek_v41' is not supported: V4.1 has another architecture "
                "(delayed mixing, shared compressors, Engram tables); use a V4-Flash or V4-Pro "
                "checkpoint"
            )
        if "vision_config" in self.data or "vision" in architectures.lower():
            raise ConfigError(
                "this is a vision variant of DeepSeek-V4 (vision_config present); only the text "
                "models V4-Flash and V4-Pro are supported"
            )
        if found != "deepseek_v4":
            raise ConfigError(
                f"model_type {found!r} is not supported: this engine runs 'deepseek_v4' only, "
                "whose layers (mHC streams, compressed attention) no other family shares"
            )

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, target in _INT_FIELDS.items():
            values[target] = self._int(name)
        for name, target in _FLOAT_FIELDS.items():
            values[target] = self._float(self.data, name)
        values["rope_head_dim"] = self._rope_head_dim(values["head_dim"])
        values["max_positions"] = self._int(
            "max_position_embeddings", default=self._int("max_seq_len", default=1048576)
        )
        values["bos_id"] = self._int("bos_token_id", default=0)
        values["eos_ids"] = self._eos_ids()
        values.update(self._ratios(values["num_layers"]))
        values["num_hash_layers"] = self._num_hash_layers(values["num_layers"])
        values.update(self._rope())
        for name, allowed in _FIXED.items():
            if name in self.data and self.data[name] not in allowed:
                raise ConfigError(
                    f"{name} is {self.data[name]!r}; DeepSeek-V4 always has {allowed[0]!r}"
                )
        known = _INT_FIELDS.keys() | _FLOAT_FIELDS.keys() | _FIXED.keys() | _IGNORED
        unknown = sorted(key for key in self.data if key not in known)
        if unknown:
            log.warning("config.json has fields dsv4 does not know: %s", ", ".join(unknown))
        return values

    def _int(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name, default)
        if value is None:
            if name in self.data and default is not None:
                return default
            raise ConfigError(f"{name} is missing; a DeepSeek-V4 config has it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}, expected an integer")
        return value

    def _eos_ids(self) -> tuple[int, ...]:
        """One id or a list of them."""
        listed = self.data.get("eos_token_id")
        if not isinstance(listed, list):
            return (self._int("eos_token_id", default=1),)
        if not 1 <= len(listed) <= MAX_EOS_IDS or not all(type(item) is int for item in listed):
            raise ConfigError(
                f"eos_token_id is {str(listed)[:80]}, expected a token id or a list of 1 to "
                f"{MAX_EOS_IDS} of them"
            )
        return tuple(dict.fromkeys(listed))

    def _float(self, data: Mapping[str, Any], name: str, default: float | None = None) -> float:
        value = data.get(name, default)
        if value is None:
            raise ConfigError(f"{name} is missing; a DeepSeek-V4 config has it")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {value!r}, expected a number")
        if not -1e30 < value < 1e30:  # also refuses NaN and Infinity
            raise ConfigError(f"{name} is {str(value)[:40]}, expected a finite number")
        return float(value)

    def _table(self, data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """A nested object; empty if absent or null."""
        value = data.get(name)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}, expected an object")
        return value or {}

    def _rope_tables(self) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
        """`rope_parameters`, and the two objects that transformers nests in it."""
        nested = self._table(self.data, "rope_parameters")
        try:
            return nested, self._table(nested, "main"), self._table(nested, "compress")
        except ConfigError as error:
            raise ConfigError(f"rope_parameters.{error}") from None

    def _rope_head_dim(self, head_dim: int) -> int:
        if "qk_rope_head_dim" in self.data:
            return self._int("qk_rope_head_dim")
        _, main, _ = self._rope_tables()
        share = self.data.get("partial_rotary_factor", main.get("partial_rotary_factor"))
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError("qk_rope_head_dim is missing; a DeepSeek-V4 config has it")
        return round(head_dim * share)

    def _ratios(self, num_layers: int) -> dict[str, Any]:
        """`compress_ratios` ends with the draft blocks' entries; `layer_types` has none."""
        listed = self.data.get("compress_ratios")
        if listed is None:
            types = self.data.get("layer_types")
            if not isinstance(types, list):
                raise ConfigError("neither compress_ratios nor layer_types is present as a list")
            if len(types) != num_layers:
                raise ConfigError(
                    f"layer_types has {len(types)} entries for num_hidden_layers {num_layers}"
                )
            for index, name in enumerate(types):
                if not isinstance(name, str) or name not in RATIO_OF_LAYER_TYPE:
                    raise ConfigError(
                        f"layer_types[{index}] is {name!r}, expected one of "
                        f"{', '.join(RATIO_OF_LAYER_TYPE)}"
                    )
            self._check_rates()
            ratios = [RATIO_OF_LAYER_TYPE[name] for name in types]
            num_draft = self._int("num_nextn_predict_layers", default=0)
            return {
                "compress_ratios": tuple(ratios),
                "num_draft_layers": num_draft,
                **read_drafter(self.data),
            }
        if not isinstance(listed, list) or not all(type(r) is int for r in listed):
            raise ConfigError(f"compress_ratios is {listed!r}, expected a list of integers")
        if len(listed) < num_layers:
            raise ConfigError(
                f"compress_ratios has {len(listed)} entries, expected one for each of the "
                f"{num_layers} layers and then one for each draft block"
            )
        if any(listed[num_layers:]):
            raise ConfigError(
                f"compress_ratios ends in {listed[num_layers:]} after {num_layers} layers; the "
                "entries of draft blocks are 0"
            )
        return {
            "compress_ratios": tuple(listed[:num_layers]),
            "num_draft_layers": len(listed) - num_layers,
            **read_drafter(self.data),
        }

    def _check_rates(self) -> None:
        rates = dict(self._table(self.data, "compress_rates"))
        rates.setdefault("compressed_sparse_attention", self.data.get("compress_rate_csa", 4))
        rates.setdefault("heavily_compressed_attention", self.data.get("compress_rate_hca", 128))
        for name, rate in rates.items():
            if RATIO_OF_LAYER_TYPE.get(name) != rate:
                raise ConfigError(
                    f"compress_rates[{name!r}] is {rate!r}; DeepSeek-V4 has 4 for "
                    "compressed_sparse_attention and 128 for heavily_compressed_attention"
                )

    def _num_hash_layers(self, num_layers: int) -> int:
        types = self.data.get("mlp_layer_types")
        if types is None:
            return self._int("num_hash_layers", default=3)
        if not isinstance(types, list) or len(types) != num_layers:
            raise ConfigError(f"mlp_layer_types must be a list of {num_layers} entries")
        for index, name in enumerate(types):
            if name not in ("hash_moe", "moe"):
                raise ConfigError(f"mlp_layer_types[{index}] is {name!r}, expected hash_moe or moe")
        num_hash = types.count("hash_moe")
        if "moe" in types[:num_hash]:
            late = num_hash + types[num_hash:].index("hash_moe")
            raise ConfigError(
                f"mlp_layer_types[{late}] is hash_moe after a moe layer; the layers routed by "
                "token id come first in every published DeepSeek-V4, and other config.json files "
                "only say how many they are (num_hash_layers)"
            )
        return num_hash

    def _rope(self) -> dict[str, Any]:
        nested, main, yarn = self._rope_tables()
        if "main" in nested or "compress" in nested:
            theta = self._float(main, "rope_theta", self.data.get("rope_theta"))
            compress_theta = self._float(yarn, "rope_theta", self.data.get("compress_rope_theta"))
            if main.get("rope_type", "default") != "default":
                raise ConfigError("rope_parameters.main must be plain rope (rope_type 'default')")
        else:
            yarn = self._table(self.data, "rope_scaling") or nested
            theta = self._float(self.data, "rope_theta", nested.get("rope_theta"))
            compress_theta = self._float(self.data, "compress_rope_theta")
        kind = yarn.get("rope_type", yarn.get("type", "default"))
        if kind not in ("yarn", "default"):
            raise ConfigError(f"rope_scaling type is {kind!r}, expected 'yarn'")
        if yarn.get("attention_factor", 1.0) not in (1, 1.0, None):
            raise ConfigError(
                f"rope attention_factor is {yarn['attention_factor']}; DeepSeek-V4 has 1"
            )
        values: dict[str, Any] = {"rope_theta": theta, "compress_rope_theta": compress_theta}
        if kind == "default":
            return {**values, "yarn_factor": 1.0}
        if "compress" in nested and yarn.get("attention_factor") is None:
            log.warning(
                "config.json: rope_parameters.compress has no attention_factor; dsv4 takes 1, as "
                "every DeepSeek-V4 has it, transformers would derive another from the factor: "
                'write "attention_factor": 1.0'
            )
        original = yarn.get("original_max_position_embeddings")
        if type(original) is not int:
            raise ConfigError(
                f"rope_scaling.original_max_position_embeddings is {original!r}, expected an "
                "integer"
            )
        return {
            **values,
            "yarn_factor": self._float(yarn, "factor"),
            "yarn_original_len": original,
            "yarn_beta_fast": self._float(yarn, "beta_fast", 32.0),
            "yarn_beta_slow": self._float(yarn, "beta_slow", 1.0),
        }


def read_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Field values of ModelConfig from a parsed `config.json`, whatever its spelling."""
    return _ConfigReader(data).values()
