"""A trained state becomes a checkpoint: python -m training.export --state DIR --out DIR

ModelOpt NVFP4 layout under official names: `weight`, `weight_scale`, `weight_scale_2` for every
linear layer (w1 and w3 share their global), bf16 for embedding, head, router and norms, fp32 for
mixing, sinks and biases. Beside it config.json, tokenizer.json and the held-out prompts.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.checkpoint.names import Parameter
from dsv4.config import ModelConfig
from dsv4.formats import nvfp4
from dsv4.testing import config_json
from training.evaluate import held_out
from training.sample import TOOLS, Sample
from training.shape import CONFIG, TOKENIZER
from training.skills import MAKERS
from training.weights import all_parameters, load_state

MOST_BYTES = 16_000_000
HELD_OUT_COUNT = 200


def _nvfp4(name: str, matrix: Tensor, global_: Tensor | None = None) -> dict[str, Tensor]:
    packed, scale, scale_2 = nvfp4.quantize(matrix.float(), global_=global_)
    return {
        f"{name}.weight": packed.contiguous(),
        f"{name}.weight_scale": scale.contiguous(),
        f"{name}.weight_scale_2": scale_2.reshape(()).clone(),
    }


def _joined(prefix: str, matrix: Tensor) -> dict[str, Tensor]:
    """w1 above w3: two matrices with one global scale."""
    global_ = nvfp4.global_scale(matrix.abs().amax())
    gate, up = matrix.chunk(2)
    return _nvfp4(f"{prefix}.w1", gate, global_) | _nvfp4(f"{prefix}.w3", up, global_)


def tensors(
    config: ModelConfig, table: dict[str, Tensor], wanted: dict[str, Parameter] | None = None
) -> dict[str, Tensor]:
    """All tensors of the file under official names, or only those `wanted`."""
    out: dict[str, Tensor] = {}
    for name, parameter in (wanted or all_parameters(config)).items():
        weight = table[name].detach().cpu()
        module, _, leaf = name.rpartition(".")
        if leaf in ("w13", "w2"):
            stacked = module.endswith(".experts")
            for number, matrix in enumerate(weight if stacked else weight[None]):
                prefix = f"{module}.{number}" if stacked else module
                out |= _joined(prefix, matrix) if leaf == "w13" else _nvfp4(f"{prefix}.w2", matrix)
        elif parameter.kind == "table":
            out[name] = weight.to(torch.int32)
        elif parameter.kind == "fp32":
            out[name] = weight.float().contiguous()
        elif parameter.kind == "linear" and not name.endswith("weights_proj.weight"):
            out |= _nvfp4(module, weight)
        else:
            out[name] = weight.to(torch.bfloat16).contiguous()
    return out


def quantization_config() -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["embed", "head", "*.ffn.gate", "*.attn.indexer.weights_proj"],
        "producer": {"name": "dsv4 training", "version": "1"},
    }


def held_out_lines() -> list[str]:
    """The evaluation's prompts: a first line with the tools, then one line each."""
    lines = [json.dumps({"tools": list(TOOLS)}, ensure_ascii=False)]
    for skill in MAKERS:
        lines += [_line(sample) for sample in held_out(skill, HELD_OUT_COUNT)]
    return lines


def _line(sample: Sample) -> str:
    last = sample.messages[-1]
    entry: dict[str, Any] = {
        "skill": sample.skill,
        "mode": sample.mode,
        "messages": sample.messages[:-1],
    }
    if sample.tools:
        entry["tools"] = sample.tools
    if last.get("tool_calls"):
        function = last["tool_calls"][0]["function"]
        entry["call"] = [function["name"], json.loads(function["arguments"])]
    else:
        entry["answer"] = last["content"]
    return json.dumps(entry, ensure_ascii=False)


def export(table: dict[str, Tensor], folder: Path, config: ModelConfig = CONFIG) -> dict[str, int]:
    """Write the folder; returns bytes by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(config, table), folder / "model.safetensors", metadata={"format": "pt"})
    described = {**config_json(config), "quantization_config": quantization_config()}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    text = "\n".join(held_out_lines()) + "\n"
    (folder / "quality.jsonl").write_text(text, encoding="utf-8")
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    table, facts = load_state(args.state)
    sizes = export(table, args.out)
    for name, size in sizes.items():
        print(f"{size:>12,} {name}")  # noqa: T201
    print(f"{sum(sizes.values()):>12,} in all, at most {MOST_BYTES:,}")  # noqa: T201
    print(f"evaluation at the end of training: {facts.get('evaluation')}")  # noqa: T201
    if sum(sizes.values()) > MOST_BYTES:
        raise SystemExit("too large")


if __name__ == "__main__":
    main()
