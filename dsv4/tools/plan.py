"""What fits where: bytes of weights, state and buffers, and the contexts x sequences they allow.

Pure functions without torch. State sizes come from `cache/geometry`, which the engine allocates
by. Over several GPUs the routed experts are divided (whole experts per GPU), everything else is
on every GPU, and each sequence's state lives on one of them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4.cache.geometry import POOLS, Geometry
from dsv4.checkpoint import LAYOUTS
from dsv4.checkpoint.findings import raise_errors
from dsv4.checkpoint.manifest import build_manifest
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.tools.plan_weights import Scheme, scheme_named, weight_bytes

RESERVE_BYTES = 2 * 10**9  # CUDA context, graphs, allocator slack
CONTEXTS = (4096, 32768, 131072, 262144, 524288, 1048576)
EXPERTS = "routed experts"
LOGIT_ROWS = 256  # rows of logits that one step may produce


@dataclass(frozen=True)
class Machine:
    num_gpus: int
    gpu_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_gpus <= 1024:
            raise OptionError(f"gpus is {self.num_gpus}, expected 1 to 1024")
        if not 10**9 <= self.gpu_bytes <= 10**13:
            raise OptionError(f"memory is {self.gpu_bytes / 1e9:g} GB per GPU, expected 1 to 10000")


@dataclass(frozen=True)
class Fit:
    """`sequences` over all GPUs that can have this context at once."""

    context: int
    sequence_bytes: int
    sequences: int


@dataclass(frozen=True)
class Plan:
    model: str
    weights: str
    machine: Machine
    kv_format: str
    index_format: str
    chunk_tokens: int
    checkpoint_bytes: int  # on disk, draft blocks included
    backbone_bytes: int  # what is loaded, once
    weight_bytes: dict[str, int]  # per GPU, by group
    buffer_bytes: dict[str, int]  # per GPU
    token_bytes: dict[str, float]  # growth per token of context, by kind
    fixed_bytes: dict[str, int]  # of one sequence, whatever its length
    free_bytes: int  # per GPU, for state; negative when the weights do not fit
    fits: list[Fit]
    advice: list[str]

    @property
    def possible(self) -> bool:
        return any(fit.sequences > 0 for fit in self.fits)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "possible": self.possible}


@dataclass(frozen=True)
class Subject:
    """A model whose weights are known: a shape with a scheme, or a checkpoint."""

    name: str
    config: ModelConfig
    weights: str
    groups: dict[str, int]
    checkpoint_bytes: int


def subject_of(model: str, weights: str | None, folder: Path | None = None) -> Subject:
    """`model` is flash, pro, or a checkpoint's name with its `folder`."""
    if folder is None:
        return with_scheme(model, ModelConfig.builtin(model), scheme_named(weights or "official"))
    config = ModelConfig.from_folder(folder)
    if weights is not None:
        return with_scheme(model, config, scheme_named(weights))
    manifest = build_manifest(folder, config, LAYOUTS.values())
    raise_errors(manifest.findings, str(folder))
    groups: dict[str, int] = {}
    for source in manifest.sources.values():
        group = source.parameter.group
        groups[group] = groups.get(group, 0) + source.nbytes
    layout = manifest.layout.name if manifest.layout else "mixed"
    on_disk = sum(info.nbytes for info in manifest.scan.tensors.values())
    return Subject(model, config, layout, groups, on_disk)


def buffers(config: ModelConfig, chunk_tokens: int, num_sequences: int) -> dict[str, int]:
    """Activations of one step, from the widest tensors alive together; an estimate."""
    c, tokens = config, chunk_tokens
    streams = 3 * tokens * c.hc_mult * c.hidden_size * 2  # in, out and the mixed input
    heads = 2 * tokens * c.num_heads * c.head_dim * 2  # queries and outputs
    routed = tokens * c.num_experts_per_tok
    experts = routed * (2 * c.moe_intermediate_size + 2 * c.hidden_size) * 2
    index = tokens * c.index_num_heads * c.index_head_dim * 2
    return {
        "streams": streams,
        "attention": heads + index,
        "experts": experts,
        "logits, counts, biases": 3 * num_sequences * c.vocab_size * 4,
    }


def _held(geometry: Geometry) -> dict[str, int]:
    """What a GPU holds beside weights and sequences."""
    return {
        **buffers(geometry.config, geometry.chunk_tokens, LOGIT_ROWS),
        "window of a chunk": geometry.page_bytes("window") * geometry.chunk_pages,
        "reserve": RESERVE_BYTES,
    }


def make_plan(
    subject: Subject,
    machine: Machine,
    *,
    kv_format: str = "fp8",
    index_format: str = "fp8",
    chunk_tokens: int = 4096,
    contexts: tuple[int, ...] = CONTEXTS,
) -> Plan:
    _check_choices(kv_format, index_format, chunk_tokens, contexts)
    config = subject.config
    geometry = Geometry(config, kv_format, index_format, chunk_tokens)
    per_gpu = _per_gpu(subject, machine)
    held = _held(geometry)
    free = machine.gpu_bytes - sum(per_gpu.values()) - sum(held.values())
    fits = []
    for context in contexts:
        if context > config.max_positions:
            continue
        size = geometry.sequence_bytes(context)
        fits.append(Fit(context, size, max(free // size, 0) * machine.num_gpus))
    plan = Plan(
        model=subject.name,
        weights=subject.weights,
        machine=machine,
        kv_format=kv_format,
        index_format=index_format,
        chunk_tokens=chunk_tokens,
        checkpoint_bytes=subject.checkpoint_bytes,
        backbone_bytes=sum(subject.groups.values()),
        weight_bytes=per_gpu,
        buffer_bytes=held,
        token_bytes={pool: geometry.bytes_per_token(pool) for pool in POOLS if pool != "window"},
        fixed_bytes={
            "window": geometry.page_bytes("window")
            * geometry.most_pages("window", config.max_positions),
            "compressor rows": geometry.slot_bytes(),
        },
        free_bytes=free,
        fits=fits,
        advice=[],
    )
    if plan.possible:
        return plan
    return Plan(**{**plan.__dict__, "advice": _advice(subject, plan)})


def _per_gpu(subject: Subject, machine: Machine) -> dict[str, int]:
    num_experts = subject.config.num_experts
    share = -(-num_experts // machine.num_gpus) / num_experts  # the fullest GPU counts
    return {
        group: int(nbytes * share) if group == EXPERTS else nbytes
        for group, nbytes in subject.groups.items()
    }


def _check_choices(
    kv_format: str, index_format: str, chunk_tokens: int, contexts: tuple[int, ...]
) -> None:
    if kv_format not in ("fp8", "bf16", "fp32"):
        raise OptionError(f"kv_format is {kv_format!r}, expected fp8, bf16 or fp32")
    if index_format not in ("fp4", "fp8", "bf16", "fp32"):
        raise OptionError(f"index_format is {index_format!r}, expected fp4, fp8, bf16 or fp32")
    if not 1 <= chunk_tokens <= 10**6:
        raise OptionError(f"chunk_tokens is {chunk_tokens}, expected 1 to 1000000")
    if not contexts or min(contexts) < 1:
        raise OptionError(f"contexts are {list(contexts)}, expected numbers above 0")


def _advice(subject: Subject, plan: Plan) -> list[str]:
    """What would make at least one sequence fit, each option tried on its own."""
    if not plan.fits:
        return [f"every context exceeds the model's {subject.config.max_positions} positions"]
    shortest = min(fit.context for fit in plan.fits)
    options = {
        "kv_format": plan.kv_format,
        "index_format": plan.index_format,
        "chunk_tokens": plan.chunk_tokens,
        "contexts": (shortest,),
    }
    advice = []
    for count in (2, 4, 8, 16, 32, 64, 128):
        machine = Machine(count, plan.machine.gpu_bytes)
        if count > plan.machine.num_gpus and _one_fits(subject, machine, options):
            advice.append(f"use {count} GPUs of this size")
            break
    for name in ("nvfp4", "official"):
        smaller = with_scheme(subject.name, subject.config, scheme_named(name))
        if _one_fits(smaller, plan.machine, options):
            advice.append(f"use {name} weights ({scheme_named(name).title})")
            break
    cheap = {**options, "kv_format": "fp8", "index_format": "fp4", "chunk_tokens": 512}
    if _one_fits(subject, plan.machine, cheap):
        advice.append("use kv_format fp8, index_format fp4 and chunk_tokens 512")
    missing = -plan.free_bytes / 1e9
    if plan.free_bytes < 0:
        advice.append(f"the weights and buffers alone miss {missing:.1f} GB on each GPU")
    return advice


def with_scheme(name: str, config: ModelConfig, scheme: Scheme) -> Subject:
    on_disk = sum(weight_bytes(config, scheme, draft=True).values())
    return Subject(name, config, scheme.name, weight_bytes(config, scheme), on_disk)


def _one_fits(subject: Subject, machine: Machine, options: dict[str, Any]) -> bool:
    """Whether one sequence of the shortest context would fit."""
    config = subject.config
    chunk = options["chunk_tokens"]
    geometry = Geometry(config, options["kv_format"], options["index_format"], chunk)
    weights = sum(_per_gpu(subject, machine).values())
    need = (
        weights + sum(_held(geometry).values()) + geometry.sequence_bytes(min(options["contexts"]))
    )
    return need <= machine.gpu_bytes
