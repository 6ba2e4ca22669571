"""The table of weights: first values, the router's balance, saving and loading between legs."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsv4.checkpoint.names import Parameter, draft_parameters, parameters
from dsv4.config import ModelConfig

FILE_BYTES = 14_000_000
_EMBEDDING_SPREAD = 0.5


def all_parameters(config: ModelConfig) -> dict[str, Parameter]:
    return {**parameters(config), **draft_parameters(config)}


def first_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Untrained weights, fp32, a function of config and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    site = 0
    for name, parameter in all_parameters(config).items():
        if name.endswith("_fn"):
            site += 1
        table[name] = _first(name, parameter, config, site, generator)
    return table


def _first(
    name: str, parameter: Parameter, config: ModelConfig, site: int, generator: torch.Generator
) -> Tensor:
    shape, leaf = parameter.shape, name.rpartition(".")[2]
    if parameter.kind == "table":
        order = torch.rand(shape[0], config.num_experts, generator=generator).argsort(1)
        return order[:, : shape[1]].contiguous()
    if parameter.kind == "norm":
        return torch.ones(shape)
    if leaf.endswith("_base"):
        return _mixing_base(leaf, config.hc_mult, site)
    if leaf.endswith("_scale"):
        return torch.full(shape, 0.5)
    if leaf in ("bias", "ape", "attn_sink"):
        return torch.zeros(shape)
    normal = torch.randn(shape, generator=generator)
    if leaf.endswith("_fn"):
        return normal * 0.01
    if name == "embed.weight":
        return normal * _EMBEDDING_SPREAD
    if name == "head.weight":
        return normal * 0.01
    spread = shape[-1] ** -0.5
    into_streams = leaf == "w2" or name.endswith(("wo_b.weight", "shared_experts.w2"))
    return normal * spread * (0.25 if into_streams else 1.0)


def _mixing_base(leaf: str, n: int, site: int) -> Tensor:
    """Each site reads mostly from one stream, writes to all, and leaves streams nearly alone."""
    if leaf == "hc_head_base":
        return torch.full((n,), -1.0)
    pre = torch.full((n,), -2.0)
    pre[site % n] = 1.0
    return torch.cat((pre, torch.zeros(n), (torch.eye(n) * 4.0).flatten()))


@torch.no_grad()
def balance(table: dict[str, Tensor], loads: dict[str, Tensor], rate: float) -> None:
    """Raise the selection bias of experts with too few tokens, lower it for the others."""
    for prefix, load in loads.items():
        bias = table.get(prefix + "gate.bias")
        if bias is not None:
            bias += rate * torch.sign(load.mean() - load)


def _stored(name: str, weight: Tensor) -> Tensor:
    if not weight.is_floating_point():
        return weight.to(torch.int32)
    return weight.to(torch.bfloat16) if weight.numel() >= 65536 and "hc_" not in name else weight


def save_state(folder: Path, table: dict[str, Tensor], facts: dict[str, Any]) -> int:
    """Save weights without optimiser state, in files small enough to carry; returns bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    used = total = 0
    for name, weight in table.items():
        tensor = _stored(name, weight.detach()).cpu().contiguous()
        if used + tensor.nbytes > FILE_BYTES:
            files.append({})
            used = 0
        files[-1][name] = tensor
        used += tensor.nbytes
        total += tensor.nbytes
    for number, content in enumerate(files):
        save_file(content, folder / f"state-{number}.safetensors")
    (folder / "state.json").write_text(json.dumps(facts, indent=1) + "\n")
    return total


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    table: dict[str, Tensor] = {}
    for path in sorted(folder.glob("state-*.safetensors")):
        table.update(load_file(path))
    if not table:
        raise SystemExit(f"{folder} holds no state-*.safetensors")
    wide = {n: t.float() if t.is_floating_point() else t.long() for n, t in table.items()}
    facts: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return wide, facts
