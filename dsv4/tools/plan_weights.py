"""Bytes and tensor counts of a model's weights in each number format, from the config alone."""

from collections import defaultdict
from dataclasses import dataclass

from dsv4.checkpoint.names import Parameter, draft_parameters, parameters
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.spec import FORMATS

_DENSE = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w13", "w2", "e_proj", "h_proj", "main_proj")
_TENSORS = {"fp8": 2, "fp8_f32": 2, "mxfp4": 2, "nvfp4": 4}  # weight with its scales


@dataclass(frozen=True)
class Scheme:
    """Which format each kind of matrix has. `dense` is what the official files hold as FP8;
    `other` the remaining linears (compressor, index weights)."""

    name: str
    title: str
    experts: str
    dense: str
    other: str = "bf16"
    draft_experts: str | None = None  # if different from the main ones
    norms: str = "bf16"

    def format_of(self, name: str, parameter: Parameter) -> str:
        if parameter.kind == "norm":
            return self.norms
        if parameter.kind == "fp32":
            return "fp32"
        if parameter.kind == "plain":
            return "bf16"
        if ".ffn.experts." in name:
            is_draft = name.startswith("mtp.")
            return (self.draft_experts if is_draft else None) or self.experts
        parts = name.removesuffix(".weight").split(".")
        dense = parts[-1] in _DENSE and "compressor" not in parts
        return self.dense if dense else self.other


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("official", "MXFP4 experts, FP8 attention", "mxfp4", "fp8"),
        Scheme("nvfp4", "NVFP4 experts, FP8 attention", "nvfp4", "fp8", draft_experts="mxfp4"),
        Scheme("nvfp4-all", "NVFP4 everywhere", "nvfp4", "nvfp4", other="nvfp4"),
        Scheme("fp8", "FP8 experts and attention", "fp8", "fp8"),
        Scheme("base", "FP8 with float32 scales", "fp8_f32", "fp8_f32"),
        Scheme("bf16", "unquantised", "bf16", "bf16", norms="fp32"),
    )
}


def scheme_named(name: str) -> Scheme:
    if name not in SCHEMES:
        raise OptionError(f"weights are {name!r}, expected one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def _measure(name: str, parameter: Parameter, scheme: Scheme) -> tuple[int, int]:
    """(bytes, tensors on disk) of one parameter."""
    count = 1
    for size in parameter.shape:
        count *= size
    if parameter.kind == "table":
        return count * 8, 1
    label = scheme.format_of(name, parameter)
    if len(parameter.shape) == 1:
        return count * FORMATS[label].bits // 8, 1
    *lead, rows, cols = parameter.shape
    joined = 2 if name.endswith(".w13") else 1
    matrices = joined * (lead[0] if lead else 1)
    nbytes = FORMATS[label].nbytes(rows // joined, cols, matrices)
    return nbytes, matrices * _TENSORS.get(label, 1)


def weight_bytes(config: ModelConfig, scheme: Scheme, *, draft: bool = False) -> dict[str, int]:
    """Bytes by parameter group; with `draft` also the draft blocks, as stored on disk."""
    groups: dict[str, int] = defaultdict(int)
    chosen = dict(parameters(config))
    if draft:
        chosen |= draft_parameters(config)
    for name, parameter in chosen.items():
        groups[parameter.group] += _measure(name, parameter, scheme)[0]
    return dict(groups)


def parameter_bytes(config: ModelConfig, scheme: Scheme) -> dict[str, int]:
    """Bytes of every parameter, by its name."""
    return {name: _measure(name, item, scheme)[0] for name, item in parameters(config).items()}


def num_tensors(config: ModelConfig, scheme: Scheme, *, draft: bool = True) -> int:
    """Tensors on disk."""
    chosen = dict(parameters(config))
    if draft:
        chosen |= draft_parameters(config)
    return sum(_measure(name, item, scheme)[1] for name, item in chosen.items())


def num_parameters(config: ModelConfig, *, draft: bool = False) -> int:
    chosen = dict(parameters(config))
    if draft:
        chosen |= draft_parameters(config)
    total = 0
    for item in chosen.values():
        count = 1
        for size in item.shape:
            count *= size
        total += count
    return total
