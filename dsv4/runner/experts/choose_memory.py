"""Whether all experts stay on the GPU, and the settings that follow. Pure, shared by the engine and
`plan`; no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CapacityError, OptionError
from dsv4.runner.activations import HOPPER_AUTO
from dsv4.runner.experts.budget import ExpertBudget, fit_experts
from dsv4.runner.settings import GPU_CHUNK, Settings, step_bytes
from dsv4.util.sizes import size_text

STATE_SHARE = 0.02  # of a GPU, for state, if experts compete with it and no size was asked for
LEAST_CONTEXT = 32768  # tokens of context that must fit for all experts to stay
CHUNK_TOKENS, SMALL_CHUNK = 8192, 4096  # prompt tokens per step: layers take longer than copies
LARGE_GPU = 10**11
BLOCK_MULTIPLE = 256

Resolve = Callable[[EngineConfig, int], Settings]  # choices, and bytes for state


@dataclass(frozen=True)
class WeightBytes:
    """Bytes on a GPU. `experts`: routed experts of the main layers; `formats`: theirs."""

    total: int
    experts: int
    formats: frozenset[str] = frozenset()

    @property
    def can_leave(self) -> bool:
        """Whether kernels can find experts through a table."""
        return self.formats <= {"mxfp4", "nvfp4"}

    def block(self, config: ModelConfig) -> int:
        each = -(-self.experts // (config.num_layers * config.num_experts))
        return -(-each // BLOCK_MULTIPLE) * BLOCK_MULTIPLE


@dataclass(frozen=True)
class ExpertChoice:
    settings: Settings
    budget: ExpertBudget | None  # None: all stay
    room: int = 0  # bytes of GPU memory for experts


def choose_experts(
    choices: EngineConfig,
    config: ModelConfig,
    weights: WeightBytes,
    free: int,
    total: int,
    resolve: Resolve,
) -> ExpertChoice:
    """For one GPU with `free` of `total` bytes free."""
    tokens = choices.chunk_tokens or GPU_CHUNK
    # `auto` may be a8, with all experts on the GPU
    rows = "a8" if choices.activations == "auto" else choices.activations
    step = step_bytes(total, config, tokens, rows)
    left = free - weights.total - step
    asked = choices.expert_bytes
    if not asked:
        found = _all_resident(choices, config, left, resolve)
        if isinstance(found, Settings):
            return ExpertChoice(found, None)
        if choices.expert_memory == "all" or not weights.can_leave:
            if isinstance(found, CapacityError):
                raise found
            raise CapacityError(
                f"the weights take {size_text(weights.total)} and a step about "
                f"{size_text(step)}, the GPU has {size_text(free)} of "
                f"{size_text(total)} free; use MXFP4 or NVFP4 experts and expert_memory=auto, "
                "fewer layers, or another GPU"
            )
    elif not weights.can_leave:
        raise CapacityError(
            f"expert_memory is {choices.expert_memory!r}, but experts are stored as "
            f"{', '.join(sorted(weights.formats))}; only MXFP4 and NVFP4 are read from host memory"
        )
    large = total >= LARGE_GPU
    tokens = choices.chunk_tokens or (CHUNK_TOKENS if large else SMALL_CHUNK)
    if choices.max_context is not None:
        tokens = min(tokens, choices.max_context)
    choices = replace(choices, chunk_tokens=tokens)
    step = step_bytes(total, config, tokens, choices.activations)
    room = free - weights.total - step + weights.experts
    if room <= 0:
        raise CapacityError(
            f"the weights without experts take {size_text(weights.total - weights.experts)} and a "
            f"step about {size_text(step)}, the GPU has {size_text(free)} of "
            f"{size_text(total)} free; use another GPU or several"
        )
    settings = _beside_experts(choices, room - asked if asked else room, total, asked, resolve)
    sizes = settings.max_context, settings.max_sequences, settings.state_tokens
    room = asked or room - settings.geometry(config).state_bytes(*sizes)
    counts = config.num_layers, config.num_experts, weights.block(config)
    budget = fit_experts(room, *counts, config.num_experts_per_tok)
    if budget is not None:
        settings = _without_few_bits(settings)
    return ExpertChoice(settings, budget, room)


def _all_resident(
    choices: EngineConfig, config: ModelConfig, left: int, resolve: Resolve
) -> Settings | CapacityError | None:
    """Settings with all experts on the GPU; or why not."""
    if left <= 0:
        return None
    try:
        found = resolve(choices, left)
    except CapacityError as error:
        return error
    asked = choices.max_context is not None or choices.expert_memory == "all"
    enough = min(LEAST_CONTEXT, config.max_positions)
    return found if asked or found.max_context >= enough else None


def _beside_experts(
    choices: EngineConfig, room: int, total: int, asked: int, resolve: Resolve
) -> Settings:
    """If a size for experts was asked for, the state gets the rest; otherwise a share of the GPU,
    or more if the choices need it."""
    if asked:
        try:
            return resolve(choices, max(room, 0))
        except CapacityError as error:
            raise CapacityError(
                f"expert_memory is {size_text(asked)}, but the GPU has {size_text(room + asked)} "
                f"for experts and state together; lower it, or use auto ({error})"
            ) from error
    try:
        return resolve(choices, min(room, int(STATE_SHARE * total)))
    except CapacityError:
        return resolve(choices, room)


def _without_few_bits(settings: Settings) -> Settings:
    """Kernels that read expert tables use 16-bit activations. By default the shared expert on sm_90
    then does, too: it streams between them."""
    widths = {**settings.activations, "routed experts": "a16"}
    if settings.activations == HOPPER_AUTO:
        widths["shared expert"] = "a16"
    return replace(settings, activations=widths)


def choose_on_cpu(
    choices: EngineConfig, config: ModelConfig, weights: WeightBytes, settings: Settings
) -> ExpertChoice:
    """A CPU has only main memory: experts are divided only on request, for tests."""
    if not choices.expert_bytes:
        return ExpertChoice(settings, None)
    counts = config.num_layers, config.num_experts, weights.block(config)
    budget = fit_experts(choices.expert_bytes, *counts, config.num_experts_per_tok)
    return ExpertChoice(settings, budget, choices.expert_bytes)


def refuse_ranks(choices: EngineConfig) -> None:
    if choices.expert_bytes:
        raise OptionError(
            f"expert_memory is {choices.expert_memory!r} with tp x pp = {choices.world}; experts "
            "in host memory are for one rank, use expert_memory=auto or tp=1 and pp=1"
        )
