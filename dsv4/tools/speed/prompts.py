"""Times prompts, or chunks of long ones, as graphs, against the floor of products and bytes."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dsv4.errors import OptionError
from dsv4.model.inputs import StepInputs
from dsv4.ops.core.ragged import make_ragged
from dsv4.tools.bench_ops import Ceilings
from dsv4.tools.speed.model import (
    FilledState,
    filled_state,
    groups_with_a8,
    prefill_flops,
    shape_config,
    step_bytes,
)
from dsv4.tools.speed.profile import profile_step
from dsv4.tools.speed.steps import Bench, StepResult, captured, elapsed_ms, give_back


def prompt_inputs(state: FilledState, tokens: int, position: int = 0) -> StepInputs:
    buffers, device = state.buffers, state.buffers.device
    window, csa, hca = state.tables()
    return StepInputs(
        token_ids=torch.randint(0, buffers.vocab_size, (tokens,), device=device),
        batch=make_ragged([position], [tokens], [0], device),
        window_table=window,
        csa_table=csa,
        hca_table=hca,
        logits_rows=torch.tensor([tokens - 1], device=device),
    )


@torch.inference_mode()
def time_prompt(bench: Bench, tokens: int, position: int) -> StepResult:
    context = position + tokens
    state = filled_state(bench.config, 1, context, bench.device, chunk_tokens=tokens)
    inputs = prompt_inputs(state, tokens, position)

    def step() -> None:
        bench.model(inputs, state.layers)

    replay = captured(step, bench.device)
    repeats = 1 if bench.device.type == "cpu" else 3
    times = [elapsed_ms(replay, bench.device) for _ in range(1 + repeats)][1:]
    profile = profile_step(replay, bench.device)
    families = step_bytes(bench.config, bench.sizes, tokens, context, 1.0)
    found = bench.result(
        ("prefill", 1, tokens, tokens),
        (statistics.median(times), max(times) - min(times), 0.0),
        {**families, "attention": 0.0, "index": 0.0},
        prefill_flops(bench.config, tokens, position, a8=groups_with_a8(bench.weights)),
        kernels=profile.num_kernels,
        family_us={k: round(v, 1) for k, v in profile.share_us.items()},
    )
    return replace(found, position=position)


def check_chunks(shape: str, tokens: int, position: int) -> None:
    limit, end = shape_config(shape, None).max_positions, position + tokens
    if end > limit:
        raise OptionError(
            f"position {position} and tokens {tokens} end at {end}, expected at most the {limit} "
            f"positions of {shape}; lower one of them"
        )


def bench_prefill(
    shape: str,
    layers: int | None,
    lengths: Sequence[int],
    positions: Sequence[int],
    device: str,
    weights: str,
) -> Iterator[Ceilings | StepResult]:
    bench = Bench(shape, layers, device, weights)
    yield bench.ceilings
    for length in lengths:
        for position in positions:
            yield time_prompt(bench, length, position)
            give_back(bench.device)
