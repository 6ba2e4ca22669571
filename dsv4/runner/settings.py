"""Resolves every "auto" in EngineConfig: a pure function with a printable result."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dsv4.cache.geometry import SHARED_TOKENS, Geometry
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, OptionError
from dsv4.formats.spec import Activations
from dsv4.runner.activations import GpuFacts, choose_activations
from dsv4.util.sizes import size_text

log = logging.getLogger(__name__)

DEFAULT_SEQUENCES, GPU_SEQUENCES = 8, 32
DEFAULT_CHUNK, GPU_CHUNK = 256, 2048
DEFAULT_CONTEXT, GPU_CONTEXT = 32768, 131072  # per sequence, where the model allows more

SELECTED_OF = 4096  # scores of a row, from which selection keeps topk 8-byte numbers
SELECTED_ROWS = 257  # from which on it keeps two topk of each row, however long
STEP_SHARE = 0.04  # of a GPU, for activations, workspaces, graphs
# CUDA, kernels, graphs, logits: what 24 layers of Flash used on an H200 beyond activations
STEP_BYTES = 2 * 10**9
StageMemory = tuple[range | None, int]  # layers (None: all), bytes for their state
KEPT_PREFIXES = 4  # in the prefix cache, per sequence slot
SMALL_HIDDEN = 1024


@dataclass(frozen=True)
class Settings:
    """The settings an engine runs with."""

    device: str
    dtype: str
    kv_format: str
    index_format: str
    activations: dict[str, Activations]  # by module group
    max_context: int
    max_sequences: int
    state_tokens: int | None
    chunk_tokens: int
    max_gap_ms: float
    prefix_cache: bool
    prefix_disk: str | None
    audit_share: float
    audit_folder: str
    cuda_graphs: bool
    ops: str
    draft: str = "off"
    draft_tokens: int = 0
    expert_profile: str | None = None
    draft_auto: bool = False  # chosen here, not by the user
    homes: int = 1  # ranks that each hold the state of their own sequences

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["activations"] = self.activations_text
        return ", ".join(f"{name}={value}" for name, value in values.items())

    @property
    def activations_text(self) -> str:
        """A single width if all groups share it."""
        if len(set(self.activations.values())) == 1:
            return next(iter(self.activations.values()))
        return "/".join(f"{group} {width}" for group, width in self.activations.items())

    @property
    def home_share(self) -> "Settings":
        """The settings of one home: its share of sequences, of their tokens and of a step's."""
        if self.homes == 1:
            return self
        tokens = None if self.state_tokens is None else self.state_tokens // self.homes
        return replace(
            self,
            homes=1,
            max_sequences=self.max_sequences // self.homes,
            state_tokens=tokens,
            chunk_tokens=self.chunk_tokens // self.homes,
        )

    def _guessed_tokens(self, config: ModelConfig) -> int:
        """Positions past the end of a sequence for which a drafter stores keys."""
        return config.dspark.block if self.draft == "dspark" else self.draft_tokens

    def geometry(self, config: ModelConfig) -> Geometry:
        kept = KEPT_PREFIXES if self.prefix_cache else 0
        formats = self.kv_format, self.index_format
        drafts = self.draft not in ("off", "lookup")
        return Geometry(
            config, *formats, self.chunk_tokens, kept,
            draft_layers=config.num_draft_layers * drafts,
            spare_tokens=self._guessed_tokens(config) * drafts,
        )  # fmt: skip


def step_bytes(
    gpu_bytes: int, config: ModelConfig, chunk_tokens: int = GPU_CHUNK, activations: str = "auto"
) -> int:
    """Bytes reserved for a step: a share of large GPUs, at least what it needs. `activations`: as
    asked for."""
    needed = STEP_BYTES + chunk_tokens * row_bytes(config)
    needed += _score_bytes(config, chunk_tokens, GPU_CONTEXT)
    needed += a8_bytes(config, chunk_tokens) if activations == "a8" else 0
    return max(needed, int(STEP_SHARE * gpu_bytes))


def row_bytes(config: ModelConfig) -> int:
    """Bytes of activations and workspaces per token of a step: inputs and partial sums of experts,
    four buffers as wide as all queries, residual streams."""
    c, chosen = config, config.num_experts_per_tok + 1
    experts = chosen * (4 * c.hidden_size + 2 * c.moe_intermediate_size)
    return experts + 8 * c.num_heads * c.head_dim + 12 * c.hidden_size


def a8_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of rows quantised to a8: of attention, of the shared expert, and of each chosen one,
    whose scales lie in tiles of 256 rows (fp8_rows_triton.py)."""
    c, wide = config, max(config.hidden_size, config.moe_intermediate_size)
    rows = max(c.hidden_size, c.o_groups * c.o_lora_rank) + c.moe_intermediate_size
    numbers = tokens * (c.num_experts_per_tok * wide + rows)
    return numbers + (numbers + 256 * c.num_experts * wide) * 4 // 128


def score_bytes(config: ModelConfig, chunk_tokens: int, context: int) -> int:
    """Bytes beyond `step_bytes` for a chunk's index scores at the end of the context, and for what
    selection keeps of them. They grow with chunk and context: 2,048 tokens at a million take 2 GB,
    and what fewer rows than SELECTED_ROWS keep takes 70 MB."""
    return _score_bytes(config, chunk_tokens, max(0, context - GPU_CONTEXT))


def _score_bytes(config: ModelConfig, chunk_tokens: int, context: int) -> int:
    if 4 not in config.compress_ratios:
        return 0
    kept = min(chunk_tokens, SELECTED_ROWS) * context // 4 // SELECTED_OF * config.index_topk
    return chunk_tokens * context // 4 * 4 + 8 * kept


def available_memory() -> int:
    """Bytes of main memory available without swapping; half of the total if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def resolve(
    choices: EngineConfig,
    config: ModelConfig,
    *,
    has_gpu: bool,
    memory_bytes: int,
    gpu: GpuFacts | None = None,
    stages: Sequence[StageMemory] = (),
) -> Settings:
    """`memory_bytes`: the limit for the state; only defaults are lowered to fit it, explicit
    choices are not. `gpu`: decides the activation precision. `stages`: with several ranks, the
    layers of each stage and its limit."""
    device = choices.device
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if device.startswith("cuda") and not has_gpu:
        raise OptionError(f"device is {device!r}, but torch sees no GPU here; use device=cpu")
    on_gpu = device != "cpu"
    longest = GPU_CONTEXT if on_gpu else DEFAULT_CONTEXT
    context = choices.max_context or min(config.max_positions, longest)
    if context > config.max_positions:
        raise OptionError(
            f"max_context is {context}, the model's limit is {config.max_positions} tokens"
        )
    homes = homes_of(choices)
    if choices.state_tokens is not None and choices.state_tokens < context * homes:
        each = f" on each of {homes} ranks (attention=dp)" if homes > 1 else ""
        raise OptionError(
            f"state_tokens is {choices.state_tokens}, expected at least the {context} of one "
            f"sequence{each}; raise it or lower max_context"
        )
    if choices.max_sequences is not None and choices.max_sequences % homes:
        raise OptionError(
            f"max_sequences is {choices.max_sequences}, expected a multiple of tp {homes} with "
            "attention=dp: each rank has as many of its own"
        )
    settings = Settings(
        device=device,
        dtype=_pick(choices.dtype, "bfloat16" if on_gpu else "float32"),
        kv_format=_pick(choices.kv_format, "fp8" if on_gpu else "fp32"),
        index_format=_pick(choices.index_format, "fp8" if on_gpu else "fp32"),
        activations=choose_activations(choices.activations, gpu if on_gpu else None).widths,
        max_context=context,
        max_sequences=choices.max_sequences or (GPU_SEQUENCES if on_gpu else DEFAULT_SEQUENCES),
        chunk_tokens=_chunk(choices, context, GPU_CHUNK if on_gpu else DEFAULT_CHUNK),
        max_gap_ms=choices.max_gap_ms,
        state_tokens=choices.state_tokens,
        prefix_cache=choices.prefix_cache,
        prefix_disk=choices.prefix_disk,
        audit_share=choices.audit_share,
        audit_folder=choices.audit_folder,
        cuda_graphs=choices.cuda_graphs and on_gpu,
        ops=choices.ops,
        expert_profile=choices.expert_profile,
        homes=homes,
        **_drafting(choices, config),
    )
    return _fit(settings, choices, config, stages or ((None, memory_bytes),))


def homes_of(choices: EngineConfig) -> int:
    """Ranks that each have sequences of their own; 1 until `auto` is resolved."""
    return choices.tp if choices.attention == "dp" and choices.tp != "auto" else 1


def _chunk(choices: EngineConfig, context: int, default: int) -> int:
    """Prompt tokens of a step: whole blocks of 128 at each home, if there are enough of them."""
    homes = homes_of(choices)
    each = max((choices.chunk_tokens or default) // homes, 1)
    if homes > 1:
        least = 1 if choices.chunk_tokens else SHARED_TOKENS
        each = max(each // SHARED_TOKENS * SHARED_TOKENS or each, least)
    return min(each, context) * homes


DRAFT_TOKENS = {"off": 0, "lookup": 4, "mtp": 3}  # dspark: its block


def _drafting(choices: EngineConfig, config: ModelConfig) -> dict[str, Any]:
    """The drafter; `auto`: the checkpoint's own, or lookup. Whether drafts pay off is measured at
    run time (dsv4/scheduler/drafts.py)."""
    name, has = choices.draft, config.draft_kind if config.num_draft_layers else ""
    if is_auto := name == "auto":
        name = "off" if choices.world > 1 else has or "lookup"
    if name in ("mtp", "dspark") and has != name:
        found = f"{has}, {config.num_draft_layers} blocks" if has else "no draft blocks"
        use = f"{has}, lookup" if has else "lookup"
        raise OptionError(f"draft is {name!r}, but this checkpoint has {found}; use {use} or off")
    if name in ("mtp", "dspark") and choices.world > 1:
        use = "off" if choices.pp > 1 or homes_of(choices) > 1 else "lookup or off"
        raise OptionError(f"draft is {name!r}, which runs on one rank only; use {use}")
    if name != "off" and (choices.pp > 1 or homes_of(choices) > 1):
        found = f"pp {choices.pp}" if choices.pp > 1 else "attention=dp"
        raise OptionError(
            f"draft is {name!r} with {found}, expected one stage whose ranks divide heads; use "
            "draft=off, or tp alone"
        )
    block = config.dspark.block
    most = choices.draft_tokens or DRAFT_TOKENS.get(name, block)
    if is_auto and name == "dspark":
        most = min(most, block)
    if name == "dspark" and most > block:
        raise OptionError(
            f"draft_tokens is {most}, but this checkpoint's dspark was trained for blocks of "
            f"{block}, and more drafts would be worse ones; lower it"
        )
    tokens = most if name != "off" else 0
    return {"draft": name, "draft_tokens": tokens, "draft_auto": is_auto}


def _fit(
    settings: Settings, choices: EngineConfig, config: ModelConfig, stages: Sequence[StageMemory]
) -> Settings:
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}

    def tightest() -> tuple[int, int]:
        """State bytes and limit of the stage with the least room."""
        current = Settings(**values).home_share
        sizes = current.max_context, current.max_sequences, current.state_tokens
        scores = 0
        if current.device != "cpu":
            scores = score_bytes(config, current.chunk_tokens, current.max_context)
        found = []
        for layers, memory_bytes in stages:
            geometry = replace(current.geometry(config), layers=layers)
            found.append((geometry.state_bytes(*sizes) + scores, memory_bytes))
        return max(found, key=lambda pair: pair[0] - pair[1])

    while (needed := tightest())[0] > needed[1]:
        if choices.max_sequences is None and values["max_sequences"] > settings.homes:
            values["max_sequences"] //= 2
        elif choices.max_context is None and values["max_context"] > 1024:
            values["max_context"] //= 2
        else:
            raise CapacityError(
                f"the state of {values['max_sequences'] // settings.homes} sequences of "
                f"{values['max_context']} "
                f"tokens takes {size_text(needed[0])}, {size_text(needed[1])} "
                "are free; lower max_context or max_sequences, or choose a smaller kv_format"
            )
    return Settings(**values)


def _pick(choice: str, default: str) -> str:
    return default if choice == "auto" else choice


def wants_one_thread(device: str, config: ModelConfig) -> bool:
    """A small model's ops on a CPU finish before other threads wake up, and on a busy machine
    waiting for those costs a factor of ten. OMP_NUM_THREADS takes precedence."""
    is_small = device == "cpu" and config.hidden_size <= SMALL_HIDDEN
    return is_small and "OMP_NUM_THREADS" not in os.environ
