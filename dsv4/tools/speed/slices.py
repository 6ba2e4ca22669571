"""The compute part of a layout, measured on one device: one rank's slices, without its peers.

Values are meaningless: instead of its peers' data the rank reads random numbers (on a GPU) or
copies of its own. Times are for a rank that never waits; on a GPU they include the launches of its
exchanges, which store to this GPU's memory. A rank computes an even share of the chosen experts;
the fullest rank has more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.checkpoint.names import Parameter, parameters
from dsv4.checkpoint.rank_slices import selection, slice_for
from dsv4.config import ModelConfig
from dsv4.model.exchange import Exchange
from dsv4.model.transformer import Transformer
from dsv4.ops.gemm.embed import embed
from dsv4.parallel.channels import channel_bytes
from dsv4.parallel.layout import RankLayout
from dsv4.runner.forward import sample_tokens
from dsv4.tools.speed.model import (
    FilledState,
    decode_step,
    filled_state,
    random_weight,
    shape_config,
    start_at,
)
from dsv4.tools.speed.prompts import prompt_inputs
from dsv4.tools.speed.steps import REPLAYS, captured, elapsed_ms


class EchoComm:
    """A rank whose peers echo its own data immediately; with `pushes`, they send nothing."""

    def __init__(self, pushes: Any = None) -> None:
        self.pushes = pushes
        self.error: Tensor | None = None if pushes is None else pushes.error

    def gather(self, out: Tensor, x: Tensor) -> None:
        if self.pushes is not None:
            self.pushes.gather(out, x)
            return
        out.copy_(x.expand_as(out))

    def exchange(
        self, out: Tensor, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        out.zero_()
        count = min(len(out), len(x))
        out[:count].copy_(x[:count])

    def send(self, x: Tensor, to: int) -> None:
        """There is no peer."""

    def receive(self, out: Tensor, source: int) -> None:
        out.zero_()

    def receive_logits(self, out: Tensor) -> Callable[[], None]:
        return lambda: None

    def send_logits(self, x: Tensor) -> None:
        """There is no peer."""

    def share(self, x: Tensor) -> None:
        """Every rank has it."""


@dataclass(frozen=True)
class SliceTime:
    """`full_ms`: for all layers of the shape; embedding, head and sampling counted once."""

    what: str  # decode or prefill
    shape: str
    tp: int
    experts: str  # whole or split
    layers: int
    batch: int
    context: int
    ms: float
    rest_ms: float  # these three
    full_ms: float
    weight_bytes: int


def sliced_parameters(config: ModelConfig, layout: RankLayout) -> dict[str, Parameter]:
    """A rank's parameters, with the shapes of its slices."""
    select, found = selection(layout, config), {}
    for name, parameter in parameters(config).items():
        cut = slice_for(name, parameter, select, config)
        found[name] = replace(parameter, shape=cut.shape(name, parameter.shape))
    return found


def sliced_model(
    config: ModelConfig, layout: RankLayout, rows: int, sequences: int, device: torch.device
) -> tuple[Transformer, int]:
    """Rank 0's part with random weights, and its bytes; for steps of `rows` rows."""
    torch.manual_seed(0)
    table = {
        name: random_weight(name, parameter, config, device)
        for name, parameter in sliced_parameters(config, layout).items()
    }
    pushes = None
    if device.type == "cuda" and layout.tp > 1:
        half = channel_bytes(config, layout, rows, sequences).tensor
        from dsv4.ops.comm.symmetric_triton import EchoPushes  # needs Triton

        pushes = EchoPushes(layout.tp, half, config.num_experts, device)
    exchange = Exchange(layout, EchoComm(pushes), config)
    model = Transformer(config, table, torch.bfloat16, exchange)
    return model, sum(weight.nbytes for weight in table.values())


def measure_slices(
    shape: str,
    layers: int | None,
    tps: Sequence[int],
    batches: Sequence[int],
    prompt: int,
    device: str,
    context: int = 4096,
    experts: str = "whole",
) -> Iterator[SliceTime]:
    config, where = shape_config(shape, layers), torch.device(device)
    if shape == "trial":
        config = replace(config, o_groups=2)  # two ranks can share it
    full = shape_config(shape, None).num_layers / config.num_layers
    for tp in tps:
        layout = RankLayout(tp, split_experts=experts == "split")
        layout.check(config)
        model, nbytes = sliced_model(config, layout, prompt, max(batches), where)
        for what, batch, length in (*(("decode", b, context) for b in batches),
                                    ("prefill", 1, prompt)):  # fmt: skip
            time = _decode_ms if what == "decode" else _prefill_ms
            ms, rest = time(model, batch, length, where)
            whole = round(rest + (ms - rest) * full, 4)
            yield SliceTime(what, shape, tp, experts, config.num_layers, batch, length,
                            round(ms, 4), round(rest, 4), whole, nbytes)  # fmt: skip
        error = model.exchange.comm.error
        assert error is None or int(error) == 0, "an exchange waited for a peer"
        del model
        if where.type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def _decode_ms(
    model: Transformer, batch: int, context: int, device: torch.device
) -> tuple[float, float]:
    state = filled_state(model.config, batch, context, device)

    def begin() -> None:
        start_at(state, max(context - 4 * REPLAYS - 8, 0))

    def step() -> None:
        decode_step(model, state.layers, state)

    begin()
    run = captured(step, device)
    count = 1 if device.type == "cpu" else REPLAYS
    begin()
    run()
    ms = elapsed_ms(lambda: [run() for _ in range(count)], device) / count
    return ms, _rest_ms(model, state, batch, device)


@torch.inference_mode()
def _prefill_ms(
    model: Transformer, batch: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    state = filled_state(model.config, batch, tokens, device, chunk_tokens=tokens)
    inputs = prompt_inputs(state, tokens)

    def step() -> None:
        model(inputs, state.layers)

    run = captured(step, device)
    run()
    return elapsed_ms(run, device), _rest_ms(model, state, batch, device)


def _rest_ms(model: Transformer, state: FilledState, batch: int, device: torch.device) -> float:
    """Embedding, head and sampling, including the head's exchanges."""
    rows = torch.randn(batch, model.config.hidden_size, device=device).bfloat16()

    def rest() -> None:
        buffers = state.buffers
        embed(buffers.token_ids[:batch], model.embedding, model.config.hc_mult, model.dtype)
        buffers.logits[:batch].copy_(model.exchange.logits(rows, model.head))
        sample_tokens(buffers, batch)

    run = captured(rest, device)
    count = 1 if device.type == "cpu" else REPLAYS
    run()
    return elapsed_ms(lambda: [run() for _ in range(count)], device) / count
