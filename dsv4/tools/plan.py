"""What fits on a GPU: weights, a step, and the contexts x sequences that the rest allows.

Pure functions without torch, shared with the engine: settings and step memory from
`runner/settings`, state sizes from `cache/geometry`. `speed/layouts` plans several GPUs.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsv4.cache.geometry import POOLS, Geometry
from dsv4.checkpoint import LAYOUTS
from dsv4.checkpoint.findings import raise_errors
from dsv4.checkpoint.manifest import build_manifest
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, OptionError
from dsv4.runner.experts.budget import check_host_memory
from dsv4.runner.experts.choose_memory import ExpertChoice, WeightBytes, choose_experts
from dsv4.runner.ranks.cluster import Cluster, gpu_rates
from dsv4.runner.ranks.forecast import WeightSizes
from dsv4.runner.settings import Settings, resolve, score_bytes, step_bytes
from dsv4.tools.plan_experts import ExpertPlan, ResidentTimes, plan_experts, resident_times
from dsv4.tools.plan_weights import Scheme, parameter_bytes, scheme_named, weight_bytes
from dsv4.util.draft_shape import head_bytes
from dsv4.util.sizes import size_text

CONTEXTS = (4096, 32768, 131072, 262144, 524288, 1048576)
MOST_SEQUENCES = 4096  # upper limit of the search


@dataclass(frozen=True)
class Fit:
    """How many `sequences` of this context fit together."""

    context: int
    sequence_bytes: int
    sequences: int


@dataclass(frozen=True)
class Plan:
    model: str
    weights: str
    gpu: str  # whose rates predict times
    gpu_bytes: int
    checkpoint_bytes: int  # on disk, draft blocks included
    weight_bytes: dict[str, int]  # as loaded, by group
    step_bytes: int  # kept free for activations, workspaces and graphs
    free_bytes: int  # for state; negative when the weights do not fit
    settings: Settings | None  # the engine's choice; None: nothing fits
    state_bytes: int  # of the engine with these settings
    token_bytes: dict[str, float]  # growth per token of context, by kind
    fixed_bytes: dict[str, int]  # per sequence, at any length
    fits: list[Fit]
    advice: list[str]
    experts: ExpertPlan | None = None  # where they do not all fit
    times: ResidentTimes | None = None  # where they do

    @property
    def possible(self) -> bool:
        return self.settings is not None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "possible": self.possible}


@dataclass(frozen=True)
class PlannedModel:
    """A model whose weights are known: a shape with a scheme, or a checkpoint."""

    name: str
    config: ModelConfig
    weights: str
    groups: dict[str, int]
    checkpoint_bytes: int
    nbytes: dict[str, int]  # of each parameter on a GPU
    formats: frozenset[str]  # of routed experts
    draft_bytes: int = 0  # of draft blocks on a GPU, where they are whole

    @property
    def sizes(self) -> WeightBytes:
        experts = sum(size for name, size in self.nbytes.items() if ".ffn.experts." in name)
        return WeightBytes(sum(self.groups.values()), experts, self.formats)

    @cached_property
    def rank_sizes(self) -> WeightSizes:
        """What ranks hold; one, since it keeps what it has counted for a layout."""
        return WeightSizes(self.config, self.nbytes)


def planned_model(model: str, weights: str | None, folder: Path | None = None) -> PlannedModel:
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
        groups[group] = groups.get(group, 0) + source.gpu_bytes
    layout = manifest.layout.name if manifest.layout else "mixed"
    on_disk = sum(info.nbytes for info in manifest.scan.tensors.values())
    nbytes = {name: source.gpu_bytes for name, source in manifest.sources.items()}
    routed = (s for s in manifest.sources.values() if s.parameter.group == "routed experts")
    formats = frozenset(source.format for source in routed)
    blocks = build_manifest(folder, config, LAYOUTS.values(), is_draft=True)
    has_draft = config.num_draft_layers > 0 and not config.dspark.problem
    whole = has_draft and not any(f.level == "error" for f in blocks.findings)
    copied = head_bytes(config.vocab_size, config.hidden_size)
    draft = sum((s.gpu_bytes for s in blocks.sources.values()), copied) if whole else 0
    return PlannedModel(model, config, layout, groups, on_disk, nbytes, formats, draft)


def make_plan(
    subject: PlannedModel,
    gpu_bytes: int,
    choices: EngineConfig | None = None,
    *,
    contexts: tuple[int, ...] = CONTEXTS,
    gpu: str = "h200",
    host_bytes: int | None = None,
    zipf: float = 1.0,
) -> Plan:
    """The plan of an engine with these choices on a GPU with this much free memory.
    Times are predicted from the rates of `gpu` and, if experts do not all fit, Zipf routing with
    exponent `zipf`; `host_bytes`: free host memory, None: enough."""
    if not 10**9 <= gpu_bytes <= 10**13:
        raise OptionError(f"memory is {size_text(gpu_bytes)}, expected 1 to 10000 GB")
    if not contexts or min(contexts) < 1:
        raise OptionError(f"contexts are {list(contexts)}, expected numbers above 0")
    choices = replace(choices or EngineConfig(), device="cuda")
    host_bytes = 0 if gpu_rates(gpu).bus_gbs == 0 else host_bytes
    subject, choices = _with_draft(subject, gpu_bytes, choices, host_bytes)
    config = subject.config
    roomy = _settings(choices, config, 2**62)
    assert roomy is not None
    geometry = roomy.geometry(config)
    choice, refused = _choose(subject, gpu_bytes, choices, host_bytes)
    settings, experts, groups = choice.settings if choice else None, None, dict(subject.groups)
    cluster, times = Cluster.of(gpu, 1, memory=gpu_bytes), None
    if choice is not None and choice.budget is not None:
        experts = plan_experts(subject.nbytes, config, cluster, choice, zipf)
        groups["routed experts"] = experts.gpu_bytes
    elif settings is not None:
        times = resident_times(subject.nbytes, config, cluster, settings)
    tokens = (settings or roomy).chunk_tokens
    step = step_bytes(gpu_bytes, config, tokens, choices.activations)
    free = gpu_bytes - sum(groups.values()) - step
    return Plan(
        model=subject.name,
        weights=subject.weights,
        gpu=cluster.gpu.name,
        gpu_bytes=gpu_bytes,
        checkpoint_bytes=subject.checkpoint_bytes,
        weight_bytes=groups,
        step_bytes=step,
        free_bytes=free,
        settings=settings,
        state_bytes=_state_bytes(settings, config) if settings else 0,
        token_bytes={pool: geometry.bytes_per_token(pool) for pool in POOLS if pool != "window"},
        fixed_bytes={
            "window": geometry.page_bytes("window")
            * geometry.most_pages("window", config.max_positions),
            "compressor rows": geometry.slot_bytes(),
        },
        fits=_fits(roomy, config, contexts, free),
        advice=[] if settings else refused or _advice(subject, gpu_bytes, choices, roomy, gpu),
        experts=experts,
        times=times,
    )


def _with_draft(
    subject: PlannedModel, gpu_bytes: int, choices: EngineConfig, host_bytes: int | None
) -> tuple[PlannedModel, EngineConfig]:
    """Draft blocks as the engine loads them: with `auto`, only if all weights still fit."""
    roomy = _settings(choices, subject.config, 2**62)
    if roomy is None or roomy.draft not in ("mtp", "dspark"):
        return subject, choices
    drafted = replace(subject, groups={**subject.groups, "draft": subject.draft_bytes})
    if choices.draft == "auto":
        found, _ = _choose(drafted, gpu_bytes, choices, host_bytes)
        if not subject.draft_bytes or found is None or found.budget is not None:
            return subject, replace(choices, draft="lookup")
    return drafted, choices


def _choose(
    subject: PlannedModel, gpu_bytes: int, choices: EngineConfig, host_bytes: int | None
) -> tuple[ExpertChoice | None, list[str]]:
    """The engine's choice, or None; and the reason, if experts are the cause."""

    def resolved(choices: EngineConfig, memory: int) -> Settings:
        return resolve(choices, subject.config, has_gpu=True, memory_bytes=memory)

    try:
        found = choose_experts(
            choices, subject.config, subject.sizes, gpu_bytes, gpu_bytes, resolved
        )
    except CapacityError as error:
        return None, [str(error)] if choices.expert_bytes else []
    if found.budget is not None and host_bytes is not None:
        try:
            check_host_memory(found.budget, host_bytes)
        except CapacityError as error:
            return None, [str(error)]
    return found, []


def _free(subject: PlannedModel, gpu_bytes: int, activations: str) -> int:
    step = step_bytes(gpu_bytes, subject.config, activations=activations)
    return gpu_bytes - sum(subject.groups.values()) - step


def _settings(choices: EngineConfig, config: ModelConfig, free: int) -> Settings | None:
    """The engine's settings, or None if it would refuse to start."""
    try:
        return resolve(choices, config, has_gpu=True, memory_bytes=free)
    except CapacityError:
        return None


def _fits(
    settings: Settings, config: ModelConfig, contexts: tuple[int, ...], free: int
) -> list[Fit]:
    geometry, fits = settings.geometry(config), []
    for context in contexts:
        if context <= config.max_positions:
            left = free - score_bytes(config, settings.chunk_tokens, context)
            most = most_sequences(geometry, context, left)
            fits.append(Fit(context, geometry.sequence_bytes(context), most))
    return fits


def _state_bytes(settings: Settings, config: ModelConfig) -> int:
    sizes = settings.max_context, settings.max_sequences, settings.state_tokens
    return settings.geometry(config).state_bytes(*sizes)


def most_sequences(geometry: Geometry, context: int, free: int) -> int:
    """How many sequences of this context fit together."""
    low, high = 0, MOST_SEQUENCES + 1
    while high - low > 1:
        middle = (low + high) // 2
        if geometry.state_bytes(context, middle) <= free:
            low = middle
        else:
            high = middle
    return low


def _advice(
    subject: PlannedModel, gpu_bytes: int, choices: EngineConfig, roomy: Settings, gpu: str
) -> list[str]:
    """What would let the engine start: each option is tried on its own, limited to what this
    version supports."""
    config, advice = subject.config, []
    free = _free(subject, gpu_bytes, choices.activations)
    if free < 0:
        advice.append(
            f"weights and a step alone miss {size_text(-free)}; several GPUs can share them: "
            f"dsv4 plan {subject.name} --gpus 2 --gpu {gpu}"
        )
    else:
        state = _state_bytes(roomy, config)
        advice.append(
            f"{roomy.max_sequences} sequences of {roomy.max_context:,} tokens take "
            f"{size_text(state)} of state, {size_text(free)} are left"
        )
        auto = replace(choices, max_context=None, max_sequences=None)
        for change, words in (
            ({"max_sequences": None}, "fewer sequences"),
            ({"max_context": None}, "a shorter context"),
            ({"index_format": "fp4", "kv_format": "fp8"}, "kv_format fp8 and index_format fp4"),
        ):
            if _settings(replace(choices, **change), config, free) is not None:
                advice.append(f"use {words}")
        if len(advice) == 1 and _settings(auto, config, free) is not None:
            advice.append("use fewer sequences and a shorter context")
    for name in ("official", "nvfp4"):
        smaller = with_scheme(subject.name, config, scheme_named(name))
        left = _free(smaller, gpu_bytes, choices.activations)
        if _settings(choices, config, left) is not None:
            advice.append(f"use {name} weights ({scheme_named(name).title})")
            break
    return advice


def with_scheme(name: str, config: ModelConfig, scheme: Scheme) -> PlannedModel:
    groups, on_disk = weight_bytes(config, scheme), weight_bytes(config, scheme, draft=True)
    total = sum(on_disk.values())
    draft = total - sum(groups.values())
    draft += head_bytes(config.vocab_size, config.hidden_size) if draft else 0
    return PlannedModel(
        name, config, scheme.name, groups, total, parameter_bytes(config, scheme),
        frozenset((scheme.experts,)), draft,
    )  # fmt: skip
