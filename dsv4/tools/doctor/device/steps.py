"""Whole steps at the widths of V4-Flash: with fused launches, and op by op. The bits must be equal.

Cases of ops compare each kernel with its reference, most at small sizes; a model runs fusions of
them. As an op, a step has cases like the others: its reference observes every op, which disables
fusions.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.transformer import Transformer
from dsv4.ops.core.context import EngineOps, observe
from dsv4.ops.core.op import Arguments, Case, Kernel, Op
from dsv4.runner.forward import forward, logits_of
from dsv4.tools.speed.expert_memory import RandomPlaced
from dsv4.tools.speed.model import filled_state, random_model, start_at
from dsv4.tools.speed.prompts import prompt_inputs

CONTEXT = 4096
LAYERS: dict[str, Any] = {  # one of each kind, few experts
    "vocab_size": 1000, "num_experts": 8, "num_layers": 3, "compress_ratios": (0, 4, 128),
    "num_hash_layers": 1,
}  # fmt: skip


@lru_cache(maxsize=1)
def _model(device: torch.device, official: bool) -> Transformer:
    """With weights in the formats of official checkpoints, or all of them in NVFP4."""
    config = replace(ModelConfig.builtin("flash"), **LAYERS)
    if not official:
        return random_model(config, device)[0]
    choices = EngineConfig(device=device.type, max_context=CONTEXT, expert_memory="all")
    return RandomPlaced(config, choices, device).model


def step_cases() -> Iterator[Case]:
    """`sizes`: sequences, tokens of each (the newest and drafts), tokens of a prompt or 0, and
    whether formats are official."""
    for name, *sizes in (
        ("decode 1, official formats", 1, 1, 0, 1),
        ("decode 8, official formats", 8, 1, 0, 1),
        ("prompt 300, official formats", 1, 1, 300, 1),
        ("verify 1 x 3, official formats", 1, 3, 0, 1),
        ("decode 1, nvfp4", 1, 1, 0, 0),
        ("decode 32, nvfp4", 32, 1, 0, 0),
        ("prompt 40, nvfp4", 1, 1, 40, 0),
        ("verify 8 x 3, nvfp4", 8, 3, 0, 0),
    ):
        yield Case(name, partial(_sizes, sizes), atol=0.0, rtol=0.0, small=False)


def _sizes(sizes: list[int], generator: torch.Generator) -> Arguments:
    return {"sizes": torch.tensor(sizes)}


def run_step(sizes: Tensor) -> dict[str, Tensor]:
    """Logits, and a sum of the bytes of each layer's entries."""
    batch, width, prompt, official = sizes.tolist()
    device = sizes.device
    model = _model(device, bool(official))
    torch.manual_seed(1)
    state = filled_state(model.config, batch, CONTEXT, device, max(prompt, 64), width)
    start_at(state, CONTEXT - 1)  # ends blocks of 4 and of 128
    with EngineOps().active(), torch.inference_mode():
        if prompt:
            logits = model(prompt_inputs(state, prompt), state.layers)
        else:
            forward(model, state.layers, state.buffers, state.shape)
            logits = logits_of(state.buffers, state.shape)
    entries = [pool.data for layer in state.layers for _, pool in layer.pools()]
    sums = torch.stack([data.view(torch.uint8).sum(dtype=torch.int64) for data in entries])
    return {"logits": logits, "entries": sums}


def step_by_ops(*, sizes: Tensor) -> dict[str, Tensor]:
    with observe(lambda op, arguments, call: call()):
        return run_step(sizes)


class _FusedStep(Kernel):
    """A step as an engine runs it."""

    def supports(self, arguments: Arguments) -> str | None:
        return None

    def run(self, arguments: Arguments) -> dict[str, Tensor]:
        return run_step(**arguments)


STEP = Op("step", step_by_ops, step_cases, (_FusedStep("dsv4.tools.doctor.device.fused_step"),))
