"""A layout: a name for how a checkpoint was produced, and checks against its config.

The number format is determined per tensor from the headers; a layout only recognises the whole and
compares it with `config.json`. One file each; the table is `LAYOUTS` in `dsv4/checkpoint`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dsv4.checkpoint.files.index import Scan
from dsv4.checkpoint.findings import Finding
from dsv4.checkpoint.layouts.refused import refusal as refusal
from dsv4.checkpoint.sources import Source
from dsv4.formats.spec import FP8_BLOCK


@dataclass(frozen=True)
class Facts:
    """The facts in the headers that distinguish layouts."""

    family: str
    quantization: dict[str, Any]
    config: dict[str, Any]
    experts: frozenset[str]  # formats of the routed experts
    expert_example: tuple[str, str]  # (tensor, file)
    expert_scales: frozenset[str]  # dtypes of their scales
    dense: frozenset[str]  # formats of attention, compressor, indexer, shared expert
    attention: frozenset[str]
    global_divides: bool
    scale_names: frozenset[str]  # last name components of the experts' scales
    expert_layers: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, family: str, scan: Scan, sources: Iterable[Source]) -> "Facts":
        linear = [s for s in sources if s.parameter.kind == "linear"]
        experts = [s for s in linear if s.parameter.group == "routed experts"]
        first = experts[0].stored.data if experts else None
        return cls(
            family=family,
            quantization=scan.quantization,
            config=scan.config,
            experts=frozenset(s.format for s in experts),
            expert_example=(first.name, first.file.name) if first else ("", ""),
            expert_scales=frozenset(s.stored.scale.dtype for s in experts if s.stored.scale),
            dense=frozenset(s.format for s in linear if s.parameter.group != "routed experts"),
            attention=frozenset(s.format for s in linear if s.parameter.group == "attention"),
            scale_names=frozenset(
                s.stored.scale.name.rpartition(".")[2] for s in experts if s.stored.scale
            ),
            global_divides=any(s.stored.global_divides for s in linear),
            expert_layers={s.layer: s.format for s in experts if s.layer is not None},
        )

    @property
    def method(self) -> str:
        return str(self.quantization.get("quant_method", ""))


@dataclass(frozen=True)
class Layout:
    name: str
    title: str
    matches: Callable[[Facts], bool]
    claims: Callable[[Facts], list[str]]  # contradictions between config.json and the tensors

    def cross_check(self, facts: Facts) -> list[Finding]:
        tensor, file = facts.expert_example
        return [
            Finding("error", "config", message, tensor, file, "config.json of another checkpoint")
            for message in [*self.claims(facts), *common_claims(facts)]
        ]


def block_size(quantization: dict[str, Any]) -> int:
    """The FP8 tile that the config declares; 128 by default."""
    declared = quantization.get("weight_block_size")
    groups = quantization.get("config_groups")
    if declared is None and isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and weights.get("block_structure"):
                declared = weights["block_structure"]
    if isinstance(declared, list) and len(declared) == 2 and declared[0] == declared[1]:
        size = declared[0]
        if type(size) is int and 1 <= size <= 1024:
            return size
    return FP8_BLOCK


def common_claims(facts: Facts) -> list[str]:
    """Claims that any config can make about the routed experts."""
    found = "/".join(sorted(facts.experts))
    problems = []
    wanted = {"fp4": {"mxfp4", "nvfp4"}, "fp8": {"fp8"}}
    inner = facts.quantization.get("expert_dtype")
    claimed = facts.config.get("expert_dtype") or inner
    if claimed in wanted and facts.experts - wanted[str(claimed)]:
        problems.append(f"config.json says expert_dtype {claimed!r}, the experts are {found}")
    algo = facts.quantization.get("moe_quant_algo")
    if algo == "NVFP4" and facts.experts - {"nvfp4"}:
        problems.append(f"config.json says moe_quant_algo 'NVFP4', the experts are {found}")
    layers = facts.quantization.get("quantized_layers")
    if isinstance(layers, dict):
        problems += _quantized_layers(facts, layers)
    return problems


def _quantized_layers(facts: Facts, layers: dict[str, Any]) -> list[str]:
    for layer, found in facts.expert_layers.items():
        entry = layers.get(f"layers.{layer}.ffn.experts")
        says = entry.get("quant_algo") if isinstance(entry, dict) else None
        if says == "NVFP4" and found != "nvfp4":
            return [
                f"quantized_layers says NVFP4 for the experts of layer {layer}, they are {found}"
            ]
    return []
