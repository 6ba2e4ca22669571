"""config.json and hf_quant_config.json of a converted checkpoint, in ModelOpt's form. No torch."""

from typing import Any

from dsv4.tools.convert.units import Copy, Target, Unit

_FP8_KEYS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_GROUP: dict[str, Any] = {
    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
}
_IGNORE_EXPERTS_ONLY = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
_IGNORE_FULL = ["lm_head", "*mlp.gate*", "*weights_proj*", "mtp.*"]


def new_config(
    config: dict[str, Any], target: Target, units: list[Unit | Copy], version: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(config.json, hf_quant_config.json or None) for the converted files."""
    out = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
    kept = [
        unit.matrices[0].stored.tile
        for unit in units
        if isinstance(unit, Unit) and unit.format == "keep" and _stored(unit) == "fp8"
    ]
    if target == "bf16":
        out["dtype"] = "bfloat16"
        return out, None
    producer = {"name": "dsv4", "version": version}
    if target in ("official", "fp8"):
        out["quantization_config"] = dict(_FP8_KEYS)
        return out | ({"expert_dtype": "fp4"} if target == "official" else {}), None
    if target == "nvfp4-all":
        quantization = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "producer": producer,
            "config_groups": {"group_0": {**_GROUP, "targets": ["Linear"]}},
            "ignore": _IGNORE_FULL,
        }
        out["quantization_config"] = quantization
        return out, _hf(quantization, producer, _IGNORE_FULL)
    out["expert_dtype"] = "fp4"
    dense_nvfp4 = any(
        isinstance(unit, Unit) and unit.group != "routed experts" and _stored(unit) == "nvfp4"
        for unit in units
    )
    ignore = _IGNORE_EXPERTS_ONLY[2:] if dense_nvfp4 else _IGNORE_EXPERTS_ONLY
    dense: dict[str, Any] = dict(_FP8_KEYS) if kept else {"quant_method": "modelopt"}
    squares = [list(tile) for tile in kept if tile[0] == tile[1]]
    if squares:  # scales per row or matrix are recognised by shape
        dense["weight_block_size"] = squares[0]
    quantization = {
        **dense,
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "producer": producer,
        "config_groups": {"group_0": {**_GROUP, "targets": ["*.ffn.experts.*"]}},
        "quantized_layers": {
            name: {"quant_algo": "NVFP4", "group_size": 16} for name in _layers(units)
        },
        "ignore": ignore,
    }
    out["quantization_config"] = quantization
    return out, _hf(quantization, producer, ignore)


def _stored(unit: Unit) -> str:
    return unit.matrices[0].stored.format


def _layers(units: list[Unit | Copy]) -> list[str]:
    found: dict[str, None] = {}
    for unit in units:
        if isinstance(unit, Unit) and unit.group == "routed experts":
            found[unit.matrices[0].place.module.rpartition(".")[0]] = None
    return list(found)


def _hf(
    quantization: dict[str, Any], producer: dict[str, str], ignore: list[str]
) -> dict[str, Any]:
    keys = ("quant_algo", "moe_quant_algo", "kv_cache_quant_algo", "group_size", "quantized_layers")
    inner = {key: quantization[key] for key in keys if key in quantization}
    return {"producer": producer, "quantization": {**inner, "exclude_modules": ignore}}
