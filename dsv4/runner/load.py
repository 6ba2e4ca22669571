"""Load a model by name or folder: config, checkpoint, weights under canonical names."""

import ctypes
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from dsv4 import __version__
from dsv4.cache.disk import DiskStore
from dsv4.cache.fingerprint import fingerprint
from dsv4.cache.state import StateTensors
from dsv4.checkpoint.rank_slices import Selection
from dsv4.checkpoint.reader import Checkpoint, open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, KernelError
from dsv4.formats.quantized import UnpackedTensor, Weight
from dsv4.model.draft import DraftModel, draft_model
from dsv4.model.transformer import Transformer
from dsv4.ops import engine_ops
from dsv4.ops.core.gpu import usable_device
from dsv4.ops.core.op import warn_unless_strict
from dsv4.ops.gemm.weights.repack import repack, stays_mxfp4
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.team import Team
from dsv4.runner.activations import (
    GpuFacts,
    are_official,
    choose_activations,
    describe,
    fallbacks,
    width_of,
)
from dsv4.runner.drafts.load import find_draft, without_drafts
from dsv4.runner.experts.budget import check_host_memory
from dsv4.runner.experts.choose_memory import (
    ExpertChoice,
    WeightBytes,
    choose_experts,
    choose_on_cpu,
    refuse_ranks,
)
from dsv4.runner.experts.host_memory import free_host_memory
from dsv4.runner.experts.place import PlacedWeights, open_experts
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.ranks.choose_layout import Devices, choose_layout, stage_memory
from dsv4.runner.ranks.devices import pairs_apart
from dsv4.runner.ranks.forecast import WeightSizes
from dsv4.runner.settings import (
    Settings,
    StageMemory,
    available_memory,
    resolve,
    step_bytes,
)
from dsv4.util.draft_shape import head_bytes
from dsv4.util.models import model_folder
from dsv4.util.output_paths import check_writable
from dsv4.util.progress import Progress
from dsv4.util.sizes import size_text

log = logging.getLogger(__name__)

STATE_SHARE = 0.25  # of free main memory, for the state of sequences
MOST_UNPACKED = 1 << 31  # elements of one parameter that a CPU keeps in fp32


@dataclass(frozen=True)
class LoadedModel:
    model: Transformer
    settings: Settings
    folder: Path
    team: Team | None = None  # the other ranks, if any
    draft: DraftModel | None = None
    swapper: Swapper | None = None  # if experts do not all fit


@dataclass(frozen=True)
class PreparedModel:
    """What to load and how to run it, decided before the first weight is read."""

    folder: Path
    config: ModelConfig
    checkpoint: Checkpoint
    choices: EngineConfig
    settings: Settings
    gpu: GpuFacts | None
    layout: RankLayout = RankLayout()  # noqa: RUF009  # frozen; rank 0's
    layout_why: str = ""  # if tp=auto chose it
    draft: Checkpoint | None = None  # its draft blocks, if used
    experts: ExpertChoice | None = None  # with one rank

    def __str__(self) -> str:
        s = self.settings
        home, on_cpu = s.home_share, s.device == "cpu"
        limits = home.max_context, home.max_sequences, home.state_tokens
        tp, pp, world = self.layout.tp, self.layout.pp, self.layout.world
        stages = [replace(self.layout, rank=stage * tp) for stage in range(pp)]
        all_layers, parts = home.geometry(self.config), (r.layers(self.config) for r in stages)
        state = max(replace(all_layers, layers=part).state_bytes(*limits) for part in parts)
        chosen = f"{self.layout_why}; " if self.layout_why else ""
        fullest = " on the fullest" * (world > 1)
        dp = ", attention dp" * self.layout.data_attention
        choice = choose_activations(self.choices.activations, self.gpu)
        why = choice.why if s.activations == choice.widths else "as experts in host memory need"
        sources, where = self.checkpoint.sources.items(), s.device
        weights = {name: one.nbytes if on_cpu else one.gpu_bytes for name, one in sources}
        if world > 1:
            most = size_text(max(map(WeightSizes(self.config, weights).held, stages)))
            where = f"{world} ranks (tp {tp}, pp {pp}{dp}) on {where}, {most}{fullest}"
        budget = None if self.experts is None else self.experts.budget
        placed, total = "" if budget is None else f"; {budget}", sum(weights.values())
        return (
            f"{size_text(total)} of weights ({self.checkpoint.layout} layout) on {where}; "
            f"{chosen}{s.max_sequences} sequences of {s.max_context:,} tokens at once in "
            f"{size_text(state)} of state{fullest} (kv {s.kv_format}, index {s.index_format}); "
            f"activations {s.activations_text}: {why}{placed}; draft {self._drafter}"
        )

    @property
    def _drafter(self) -> str:
        name, used = self.settings.draft, self.draft
        if used is None:
            why = ": `auto` drafts on one rank only" if self.settings.draft_auto else ""
            return name + why * (name == "off")
        return (
            f"{name}, {size_text(used.nbytes if self.settings.device == 'cpu' else used.gpu_bytes)}"
        )


def prepare(name: str, choices: EngineConfig) -> PreparedModel:
    """Read headers, measure memory and resolve settings; the only place that decides them."""
    disk, audit = choices.prefix_disk, choices.audit_folder if choices.audit_share else None
    profile = None if choices.expert_profile is None else Path(choices.expert_profile)
    check_writable(
        files=(profile,), folders=tuple(Path(path) for path in (disk, audit) if path is not None)
    )
    folder = model_folder(name)
    config = ModelConfig.from_folder(folder)
    checkpoint = open_checkpoint(folder, config)
    for finding in checkpoint.warnings:
        log.warning("%s", finding)
    choices = replace(choices, device=usable_device(choices.device))
    has_gpu = torch.cuda.is_available()
    gpu, devices = find_gpu(choices.device, checkpoint), find_devices(choices.device)
    sizes = WeightSizes(
        config, {name: source.gpu_bytes for name, source in checkpoint.sources.items()}
    )
    choice = choose_layout(choices, sizes, devices)
    choices = replace(choices, tp=choice.tp, pp=choice.pp)
    draft, damage = find_draft(checkpoint, folder, config, choices)
    layout = sizes.layout(choice.tp, choice.pp, choices)
    stages: Sequence[StageMemory] = ()
    experts = None
    if layout.world == 1:
        copied = head_bytes(config.vocab_size, config.hidden_size)
        draft_bytes = 0 if draft is None else draft.gpu_bytes + copied
        experts = _choose_experts(choices, config, checkpoint, draft_bytes, gpu)
        if draft is not None and choices.draft == "auto" and gpu and experts.budget is not None:
            draft, damage = (
                None,
                CapacityError("with its draft blocks the model does not fit the GPU"),
            )
            experts = _choose_experts(choices, config, checkpoint, 0, gpu)
    elif devices is None:
        room = state_memory("cpu", config, 0, has_gpu=False) // layout.world
        stages = [(layers, room) for layers in layout.stages] or [(None, room)]
    else:
        stages = stage_memory(sizes, layout, devices.cluster(choices.nodes, choices.comm), choices)
    if experts is not None:
        settings = experts.settings
    else:
        refuse_ranks(choices)
        settings = resolve(choices, config, has_gpu=has_gpu, memory_bytes=0, gpu=gpu, stages=stages)
    if damage is not None:
        settings = without_drafts(settings, damage)
    if profile is not None and (experts is None or experts.budget is None):
        log.warning("expert_profile %s is not used: all experts stay in place", profile)
    return PreparedModel(
        folder, config, checkpoint, choices, settings, gpu, layout, choice.why, draft, experts
    )


def _choose_experts(
    choices: EngineConfig,
    config: ModelConfig,
    checkpoint: Checkpoint,
    draft_bytes: int,
    gpu: GpuFacts | None,
) -> ExpertChoice:
    """Settings of one rank, and which experts stay on its GPU."""
    has_gpu = torch.cuda.is_available()
    on_cpu = choices.device == "cpu" or not has_gpu
    routed = [s for s in checkpoint.sources.values() if s.parameter.group == "routed experts"]
    total = checkpoint.gpu_bytes + draft_bytes
    unpacked = sum(4 * math.prod(s.parameter.shape) for s in routed)  # as a CPU keeps them
    in_memory = unpacked if on_cpu else sum(s.gpu_bytes for s in routed)
    sizes = WeightBytes(total, in_memory, frozenset(s.format for s in routed))

    def resolved(choices: EngineConfig, memory: int) -> Settings:
        return resolve(choices, config, has_gpu=has_gpu, memory_bytes=memory, gpu=gpu)

    if on_cpu:
        settings = resolved(choices, int(available_memory() * STATE_SHARE))
        found = choose_on_cpu(choices, config, sizes, settings)
    else:
        device = "cuda" if choices.device == "auto" else choices.device
        memory = torch.cuda.mem_get_info(device)
        found = choose_experts(choices, config, sizes, *memory, resolved)
    if found.budget is not None:
        shares = not on_cpu and torch.cuda.get_device_properties(device).is_integrated
        check_host_memory(found.budget, 0 if shares else free_host_memory())
    return found


Model = str | Path | PreparedModel


def load_model(
    model: Model, choices: EngineConfig, progress: Progress | None = None
) -> LoadedModel:
    """A `PreparedModel` brings its own `choices`; the argument is then ignored."""
    begin = time.perf_counter()
    prepared = model if isinstance(model, PreparedModel) else prepare(str(model), choices)
    folder, config, checkpoint = prepared.folder, prepared.config, prepared.checkpoint
    settings, placed = prepared.settings, None
    with engine_ops(settings.ops).active():
        tell_activations(checkpoint, prepared.choices.activations, prepared.gpu)
        if prepared.experts is not None and prepared.experts.budget is not None:
            examples = partial(_one_expert, checkpoint, settings)
            placed = open_experts(prepared.experts, config, settings, examples, folder)
        try:
            weights = read_weights(checkpoint, settings, progress=progress, placed=placed)
        except BaseException:
            if placed is not None:
                placed.swapper.residency.close()
            raise
    seconds = time.perf_counter() - begin
    log.info(
        "%s: %s layout, %d parameters, %s in %.1f s, %d tensors knowingly ignored",
        folder.name,
        checkpoint.layout,
        len(weights),
        size_text(checkpoint.nbytes),
        seconds,
        len(checkpoint.ignored),
    )
    transformer = Transformer(config, weights, getattr(torch, settings.dtype))
    draft = None
    if prepared.draft is not None:
        try:
            draft = draft_model(transformer, read_weights(prepared.draft, settings))
            log.info("draft block: %s", size_text(prepared.draft.nbytes))
        except Exception as error:  # answers do not need drafts
            settings = without_drafts(settings, error)
    swapper = None if placed is None else placed.swapper
    return LoadedModel(transformer, settings, folder, draft=draft, swapper=swapper)


def _one_expert(checkpoint: Checkpoint, settings: Settings) -> tuple[Weight, Weight]:
    """w13 and w2 of one expert, in the form that all will have."""
    names = [f"layers.0.ffn.experts.{name}" for name in ("w13", "w2")]
    select = Selection(names=frozenset(names), experts=range(1))
    found = read_weights(checkpoint, settings, select)
    return found[names[0]][0], found[names[1]][0]


def find_gpu(device: str, checkpoint: Checkpoint | None = None) -> GpuFacts | None:
    """The facts that decide on low-precision products with these weights; None for a CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    numbers = metadata.version("triton").split(".")
    return GpuFacts(
        torch.cuda.get_device_capability("cuda" if device == "auto" else device),
        (int(numbers[0]), int(numbers[1])),
        driver_version(),
        checkpoint is not None and are_official(checkpoint.sources.values()),
    )


def find_devices(device: str) -> Devices | None:
    """The GPUs that ranks may use; None for a CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    totals = [torch.cuda.get_device_properties(index).total_memory for index in range(count)]
    free, total = torch.cuda.mem_get_info(0)  # asking another GPU would allocate memory on it
    peers = not pairs_apart(count)
    return Devices(count, torch.cuda.get_device_name(0), min(totals) - (total - free), peers)


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the installed driver supports, as the driver reports it."""
    number = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        raise KernelError(f"the CUDA driver does not tell its version (status {status})")
    return number.value // 1000, number.value % 1000 // 10


def tell_activations(checkpoint: Checkpoint, asked: str, gpu: GpuFacts | None) -> None:
    """Log the activation precision of each weight group, with the reason; warn where a requested
    precision is not available."""
    choice, sources = choose_activations(asked, gpu), checkpoint.sources.values()
    for line in describe(sources, choice):
        log.info("%s", line)
    refused = [choice.refused] if choice.refused else []
    if asked != "auto":
        refused += fallbacks(sources, choice.widths)
    for line in refused:
        warn_unless_strict(line)


def state_memory(device: str, config: ModelConfig, weight_bytes: int, *, has_gpu: bool) -> int:
    """Bytes available for sequence state: on a GPU, what weights and a step leave free."""
    if device == "cpu" or not has_gpu:
        return int(available_memory() * STATE_SHARE)
    free, total = torch.cuda.mem_get_info("cuda" if device == "auto" else device)
    step = step_bytes(total, config)
    left = free - weight_bytes - step
    if left <= 0:
        raise CapacityError(
            f"the weights take {size_text(weight_bytes)} and a step about "
            f"{size_text(step)}, the GPU has {size_text(free)} of "
            f"{size_text(total)} free; use smaller weights, fewer layers or another GPU"
        )
    return left


def read_weights(
    checkpoint: Checkpoint,
    settings: Settings,
    select: Selection | None = None,
    progress: Progress | None = None,
    placed: PlacedWeights | None = None,
) -> dict[str, Weight]:
    """All weights; on a GPU, in the form that kernels read: matrices in the activations' dtype,
    4-bit weights repacked one at a time, so only one exists twice. Each carries its activation
    precision. Experts may be `placed`: a few at a time, each where its table says."""
    on_cpu = settings.device == "cpu"
    stream = checkpoint.stream(
        dtype=None if on_cpu else getattr(torch, settings.dtype),
        device=settings.device,
        select=select,
        mxfp4_as_nvfp4=lambda name: not (on_cpu or stays_mxfp4(name)),
        progress=progress,
        in_pieces=placed is not None,
    )
    weights: dict[str, Weight] = {}
    for name, weight in stream:
        if not isinstance(weight, torch.Tensor):
            width = width_of(checkpoint.sources[name], settings.activations)
            weight = replace(weight, activations=width)
        weight = _expand(name, weight) if on_cpu else repack(name, weight)
        if placed is None or not placed.take(name, weight):
            weights[name] = weight
    return weights if placed is None else weights | placed.weights()


def _expand(name: str, weight: Weight) -> Weight:
    """Unpack a weight to fp32 once, because CPU references compute in fp32. Large stacks of
    experts stay packed; the references unpack the experts they visit.

    Matrices are stored column-major, which the BLAS reads faster for few rows."""
    if not isinstance(weight, torch.Tensor):
        if weight.shape.numel() > MOST_UNPACKED:
            return weight
        values = _expand(name, weight.dequantize(torch.float32))
        assert isinstance(values, torch.Tensor)
        if weight.activations == "a16":
            return values
        return UnpackedTensor(values, activations=weight.activations)
    if not weight.is_floating_point():
        return weight
    weight = weight.float()
    if weight.dim() < 2 or name.endswith(("embed.weight", ".ape", "markov_w1.weight")):
        return weight  # rows are looked up in these
    return weight.mT.contiguous().mT


def disk_store(loaded: LoadedModel, state: StateTensors) -> DiskStore | None:
    """Disk store for cold prefixes, separate for each model, format, device and build."""
    settings = loaded.settings
    if settings.prefix_disk is None:
        return None
    names = ("device", "dtype", "kv_format", "index_format", "activations", "ops")
    how = {name: getattr(settings, name) for name in names}
    if settings.draft not in ("off", "lookup"):
        how["draft"] = settings.draft  # its blocks have pages too
    on_gpu = settings.device != "cpu"
    chip = torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability()
    builds = {"dsv4": __version__, "torch": torch.__version__, "chip": chip}
    model = fingerprint(loaded.folder, {**how, **builds}, Path(settings.prefix_disk))
    return DiskStore(settings.prefix_disk, model, state.shapes)
