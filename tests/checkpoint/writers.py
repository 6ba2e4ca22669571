"""Each layout of the spec written from one random model, with the exact values it then holds.

A writer returns a `Written`: the tensors as they lie on disk, what they mean (float32, under
official names) and the config keys that go with them.
"""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint import bits as num
from tests.checkpoint import tiny

Disk = dict[str, tuple[str, np.ndarray]]  # name -> (safetensors dtype, array of its bytes)


@dataclass
class Written:
    disk: Disk = field(default_factory=dict)
    truth: tiny.Model = field(default_factory=dict)
    quantization: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)


def plain(values: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
    if dtype == "BF16":
        return dtype, (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return dtype, np.ascontiguousarray(values)


def scalar(value: float) -> tuple[str, np.ndarray]:
    return "F32", np.array(value, dtype=np.float32)


def _rest(out: Written, name: str, values: np.ndarray, dtype: str = "BF16") -> None:
    """Tensors no layout quantises."""
    if name.endswith("tid2eid"):
        out.disk[name] = ("I64", values)
    elif any(part in name for part in tiny.FP32_NAMES):
        out.disk[name] = plain(values, "F32")
    else:
        out.disk[name] = plain(values, dtype)
    out.truth[name] = values


def _fp8(
    out: Written,
    name: str,
    w: np.ndarray,
    scale: str = "E8M0",
    suffix: str = "scale",
    block: int = 128,
):
    codes, floats, exponents, values = num.fp8_tiles(w, block, power_of_two=scale == "E8M0")
    module = name.removesuffix(".weight")
    out.disk[name] = ("F8_E4M3", codes)
    if scale == "E8M0":
        out.disk[f"{module}.{suffix}"] = ("F8_E8M0", exponents)
    elif scale == "BF16":
        floats = tiny.bf16(floats)
        out.disk[f"{module}.{suffix}"] = plain(floats, "BF16")
        tiles = np.kron(floats, np.ones((128, 128), np.float32))[: w.shape[0], : w.shape[1]]
        values = num.e4m3_values(codes) * tiles
    else:
        out.disk[f"{module}.{suffix}"] = plain(floats, "F32")
    out.truth[name] = values


def _mxfp4(out: Written, name: str, w: np.ndarray) -> None:
    packed, scale, values = num.mxfp4(w)
    out.disk[name] = ("I8", packed)
    out.disk[name.removesuffix("weight") + "scale"] = ("F8_E8M0", scale)
    out.truth[name] = values


def _nvfp4(out: Written, name: str, w: np.ndarray, *, divides: bool, g: float | None = None):
    module = name.removesuffix(".weight")
    if divides:  # the file holds 1 / g, so the exact multiplier is what its inverse rounds to
        stored = np.float32(1 / (float(np.abs(w).max()) / 2688 if g is None else g))
        g = float(np.float32(1 / np.float64(stored)))
    packed, scale, top, values = num.nvfp4(w, g)
    out.truth[name] = values
    if divides:
        out.disk[f"{module}.weight_packed"] = ("U8", packed)
        out.disk[f"{module}.weight_scale"] = ("F8_E4M3", scale)
        out.disk[f"{module}.weight_global_scale"] = ("F32", np.array([stored], np.float32))
        out.disk[f"{module}.input_global_scale"] = ("F32", np.array([300.0], np.float32))
    else:
        out.disk[f"{module}.weight"] = ("U8", packed)
        out.disk[f"{module}.weight_scale"] = ("F8_E4M3", scale)
        out.disk[f"{module}.weight_scale_2"] = scalar(float(top))
        out.disk[f"{module}.input_scale"] = scalar(0.03)


FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def official(model: tiny.Model) -> Written:
    """(a) FP8 attention and shared expert, MXFP4 experts, E8M0 scales."""
    out = Written(quantization=dict(FP8_CONFIG), config={"expert_dtype": "fp4"})
    for name, w in model.items():
        if tiny.is_expert(name):
            _mxfp4(out, name, w)
        elif tiny.is_fp8_linear(name):
            _fp8(out, name, w)
        else:
            _rest(out, name, w)
    return out


def base(model: tiny.Model) -> Written:
    """(a') FP8 everywhere with float32 scales."""
    out = Written(quantization=dict(FP8_CONFIG), config={"expert_dtype": "fp8"})
    del out.quantization["scale_fmt"]
    for name, w in model.items():
        if tiny.is_fp8_linear(name):
            _fp8(out, name, w, scale="F32")
        else:
            _rest(out, name, w)
    return out


def fp8_experts(model: tiny.Model) -> Written:
    """(b) FP8 experts with E8M0 scales and no expert_dtype."""
    out = Written(quantization=dict(FP8_CONFIG))
    for name, w in model.items():
        (_fp8 if tiny.is_fp8_linear(name) else _rest)(out, name, w)
    return out


def _globals(model: tiny.Model, name: str) -> float:
    """w1 and w3 share one amax."""
    twin = name.replace(".w1.", ".w3.") if ".w1." in name else name.replace(".w3.", ".w1.")
    return float(max(np.abs(model[name]).max(), np.abs(model[twin]).max())) / 2688


def modelopt_experts(model: tiny.Model, *, shared_global: bool = True) -> Written:
    """(c) NVFP4 experts of the main layers; draft experts stay MXFP4; the rest as (a)."""
    out = Written(quantization={**FP8_CONFIG, "quant_algo": "MIXED_PRECISION"})
    out.quantization |= {"moe_quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}
    layers = sorted({name.split(".ffn.experts")[0] for name in model if tiny.is_expert(name)})
    out.quantization["quantized_layers"] = {
        f"{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in layers
        if layer.startswith("layers.")
    }
    for name, w in model.items():
        if tiny.is_expert(name) and name.startswith("layers."):
            g = _globals(model, name) if shared_global and ".w2." not in name else None
            _nvfp4(out, name, w, divides=False, g=g)
        elif tiny.is_expert(name):
            _mxfp4(out, name, w)
        elif tiny.is_fp8_linear(name):
            _fp8(out, name, w)
        else:
            _rest(out, name, w)
    return out


def modelopt_full(model: tiny.Model) -> Written:
    """(d) every linear NVFP4, transformers names, experts apart, no draft."""
    inner = Written(
        quantization={"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    )
    for name, w in model.items():
        if name.startswith("mtp."):
            continue
        if tiny.is_any_linear(name):
            _nvfp4(inner, name, w, divides=False)
        else:
            _rest(inner, name, w)
    inner.disk = {transformers_name(name): value for name, value in inner.disk.items()}
    return inner


def compressed_tensors(model: tiny.Model) -> Written:
    """(e) globals that divide, FP8 attention with BF16 scales, shared expert in BF16, no draft."""
    out = Written(
        quantization={
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "block_structure": [128, 128]}},
                "group_1": {"weights": {"num_bits": 4, "group_size": 16}},
            },
        }
    )
    for name, w in model.items():
        if name.startswith("mtp."):
            continue
        if tiny.is_expert(name):
            _nvfp4(out, name, w, divides=True)
        elif tiny.is_fp8_linear(name) and "shared_experts" not in name:
            _fp8(out, name, w, scale="BF16", suffix="weight_scale")
        else:
            _rest(out, name, w)
    return out


def transformers_fp8(model: tiny.Model) -> Written:
    """FP8 as transformers saves it: experts apart under hybrid names, their scales stacked."""
    flat = Written(quantization={"quant_method": "fp8", "weight_block_size": [32, 32]})
    for name, w in model.items():
        if name.startswith("mtp."):
            continue
        if tiny.is_fp8_linear(name):
            _fp8(flat, name, w, scale="F32", suffix="weight_scale_inv", block=32)
        else:
            _rest(flat, name, w)
    for layer in range(tiny.CONFIG["num_hidden_layers"]):
        at = f"layers.{layer}.ffn.experts."
        for stack, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            scales = [
                np.concatenate([flat.disk.pop(f"{at}{e}.{w}.weight_scale_inv")[1] for w in parts])
                for e in range(tiny.CONFIG["n_routed_experts"])
            ]
            flat.disk[f"{at}{stack}_scale_inv"] = ("F32", np.stack(scales))
    return _hybrid(flat)


def plain_official(model: tiny.Model, dtype: str = "BF16") -> Written:
    out = Written()
    for name, w in model.items():
        _rest(out, name, w, dtype)
    return out


def plain_transformers(model: tiny.Model, dtype: str = "BF16") -> Written:
    """(f) with save_original_format=False: stacked experts."""
    flat = plain_official({n: w for n, w in model.items() if not n.startswith("mtp.")}, dtype)
    out = Written(truth=flat.truth)
    layers = tiny.CONFIG["num_hidden_layers"]
    experts = tiny.CONFIG["n_routed_experts"]
    for layer in range(layers):
        stacks: dict[str, list[np.ndarray]] = {"gate_up_proj": [], "down_proj": []}
        for e in range(experts):
            at = f"layers.{layer}.ffn.experts.{e}."
            w1, w3, w2 = (flat.disk.pop(f"{at}{w}.weight")[1] for w in ("w1", "w3", "w2"))
            stacks["gate_up_proj"].append(np.concatenate([w1, w3]))
            stacks["down_proj"].append(w2)
        for name, parts in stacks.items():
            out.disk[f"model.layers.{layer}.mlp.experts.{name}"] = (dtype, np.stack(parts))
    out.disk |= {transformers_name(name): value for name, value in flat.disk.items()}
    return out


def plain_hybrid(model: tiny.Model, dtype: str = "BF16") -> Written:
    """(f) as save_pretrained writes it by default."""
    return _hybrid(
        plain_official({n: w for n, w in model.items() if not n.startswith("mtp.")}, dtype)
    )


def _hybrid(flat: Written) -> Written:
    out = Written(truth=flat.truth, quantization=flat.quantization)
    for name, value in flat.disk.items():
        if name.startswith("layers."):
            new = "model." + name.replace("attn.kv_norm.", "attn.norm.")
        elif name == "head.weight":
            new = name
        else:
            new = transformers_name(name)
        out.disk[new] = value
    return out


LAYOUTS: dict[str, Callable[[tiny.Model], Written]] = {
    "official": official,
    "base": base,
    "fp8-experts": fp8_experts,
    "modelopt-experts": modelopt_experts,
    "modelopt-full": modelopt_full,
    "compressed-tensors": compressed_tensors,
    "transformers-fp8": transformers_fp8,
    "plain-official": plain_official,
    "plain-transformers": plain_transformers,
    "plain-hybrid": plain_hybrid,
}


@functools.cache
def _made(layout: str) -> Written:
    return LAYOUTS[layout](tiny.random_model())


def made(layout: str) -> Written:
    """The default model in this layout; tensors may be replaced in the copy."""
    written = _made(layout)
    quantization = copy.deepcopy(written.quantization)
    return Written(dict(written.disk), written.truth, quantization, dict(written.config))


_TRANSFORMERS = [  # the table of the spec's section 3, longest first
    ("attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"),
    ("attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"),
    ("attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm"),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    ("attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    ("attn.compressor.wkv", "self_attn.compressor.kv_proj"),
    ("attn.compressor.wgate", "self_attn.compressor.gate_proj"),
    ("attn.compressor.norm", "self_attn.compressor.kv_norm"),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    ("attn.wq_a", "self_attn.q_a_proj"),
    ("attn.q_norm", "self_attn.q_a_norm"),
    ("attn.wq_b", "self_attn.q_b_proj"),
    ("attn.wkv", "self_attn.kv_proj"),
    ("attn.kv_norm", "self_attn.kv_norm"),
    ("attn.wo_a", "self_attn.o_a_proj"),
    ("attn.wo_b", "self_attn.o_b_proj"),
    ("attn.attn_sink", "self_attn.sinks"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate", "mlp.gate"),
    ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
    ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
]


def transformers_name(name: str) -> str:
    if not name.startswith("layers."):
        if name.startswith("hc_head_"):
            return "model.hc_head.hc_" + name.removeprefix("hc_head_")
        top = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
        return top[name.split(".")[0]] + "." + name.split(".", 1)[1]
    _, layer, rest = name.split(".", 2)
    if rest.startswith("ffn.experts."):
        _, _, expert, w, suffix = rest.split(".")
        new = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}[w]
        return f"model.layers.{layer}.mlp.experts.{expert}.{new}.{suffix}"
    for old, new in _TRANSFORMERS:
        if rest.startswith(old):
            return f"model.layers.{layer}.{new}{rest.removeprefix(old)}"
    raise AssertionError(name)


def save_file(path: Path, disk: Disk) -> None:
    """A safetensors file; 8-byte aligned like the library's."""
    header, offset = {}, 0
    for name, (dtype, array) in disk.items():
        shape, size = list(array.shape), array.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, array in disk.values():
            file.write(np.ascontiguousarray(array).tobytes())


def save(written: Written, folder: Path, shards: int = 2) -> Path:
    """The whole checkpoint: config.json, shards and index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**tiny.CONFIG, **written.config}
    if written.quantization is not None:
        config["quantization_config"] = written.quantization
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(written.disk)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        # by module, so that a weight and its scales stay together, as in real files
        chosen = [n for n in names if sum(n.rpartition(".")[0].encode()) % shards == shard]
        save_file(folder / file, {name: written.disk[name] for name in chosen})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def canonical(truth: tiny.Model, config: dict[str, Any] = tiny.CONFIG) -> tiny.Model:
    """Official per-expert values -> the engine's stacked canonical names."""
    out = {n: w for n, w in truth.items() if ".experts." not in n and "shared" not in n}
    out = {n: w for n, w in out.items() if not n.startswith("mtp.")}
    experts = config["n_routed_experts"]
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}.ffn."

        def get(name: str, p: str = p) -> np.ndarray:
            return truth[f"{p}{name}.weight"]

        both = [
            np.concatenate([get(f"experts.{e}.w1"), get(f"experts.{e}.w3")]) for e in range(experts)
        ]
        out[p + "experts.w13"] = np.stack(both)
        out[p + "experts.w2"] = np.stack([get(f"experts.{e}.w2") for e in range(experts)])
        joined = np.concatenate([get("shared_experts.w1"), get("shared_experts.w3")])
        out[p + "shared_experts.w13"] = joined
        out[p + "shared_experts.w2"] = get("shared_experts.w2")
    return out
