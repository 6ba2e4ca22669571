"""The compute part of a layout, measured on one device: a rank's own slices, its peers left out.

What peers would send is replaced by copies of the rank's own, so values are meaningless and times
are those of one rank without exchanges. A rank computes its even share of the chosen experts here;
the fullest one has more.
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
from dsv4.parallel.layout import RankLayout
from dsv4.tools.speed.model import (
    FilledState,
    decode_step,
    filled_state,
    random_weight,
    shape_config,
    start_at,
)
from dsv4.tools.speed.steps import REPLAYS, captured, compile_ahead, elapsed_ms, prompt_inputs


class EchoComm:
    """A rank whose peers say what it says itself, at once."""

    pushes: Any = None
    error: Any = None

    def gather(self, out: Tensor, x: Tensor) -> None:
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
        """All have it."""


@dataclass(frozen=True)
class SliceTime:
    """`full_ms`: for all layers of the shape; embedding and head are counted with the layers."""

    what: str  # decode or prefill
    shape: str
    tp: int
    layers: int
    batch: int
    context: int
    ms: float
    full_ms: float
    weight_bytes: int


def sliced_parameters(config: ModelConfig, layout: RankLayout) -> dict[str, Parameter]:
    """What a rank holds, with the shapes of its slices."""
    select, found = selection(layout, config), {}
    for name, parameter in parameters(config).items():
        cut = slice_for(name, parameter, select, config)
        found[name] = replace(parameter, shape=cut.shape(name, parameter.shape))
    return found


def sliced_model(config: ModelConfig, tp: int, device: torch.device) -> tuple[Transformer, int]:
    """Rank 0's part with random weights, and its bytes."""
    torch.manual_seed(0)
    layout = RankLayout(tp)
    table = {
        name: random_weight(name, parameter, config, device)
        for name, parameter in sliced_parameters(config, layout).items()
    }
    exchange = Exchange(layout, EchoComm(), config)
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
) -> Iterator[SliceTime]:
    config, where = shape_config(shape, layers), torch.device(device)
    if shape == "trial":
        config = replace(config, o_groups=2)  # two ranks can share it
    full = shape_config(shape, None).num_layers / config.num_layers
    for tp in tps:
        RankLayout(tp).check(config)
        model, nbytes = sliced_model(config, tp, where)
        for batch in batches:
            ms = _decode_ms(model, batch, context, where)
            yield SliceTime("decode", shape, tp, config.num_layers, batch, context, round(ms, 4),
                            round(ms * full, 4), nbytes)  # fmt: skip
        ms = _prefill_ms(model, prompt, where)
        yield SliceTime("prefill", shape, tp, config.num_layers, 1, prompt, round(ms, 4),
                        round(ms * full, 4), nbytes)  # fmt: skip
        del model
        if where.type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def _decode_ms(model: Transformer, batch: int, context: int, device: torch.device) -> float:
    state = filled_state(model.config, batch, context, device)

    def begin() -> None:
        start_at(state, max(context - 4 * REPLAYS - 8, 0))

    def step() -> None:
        decode_step(model, state.layers, state)

    begin()
    compile_ahead(step, device)
    run = captured(step, device)
    count = 1 if device.type == "cpu" else REPLAYS
    begin()
    run()
    return elapsed_ms(lambda: [run() for _ in range(count)], device) / count


@torch.inference_mode()
def _prefill_ms(model: Transformer, tokens: int, device: torch.device) -> float:
    state: FilledState = filled_state(model.config, 1, tokens, device, chunk_tokens=tokens)
    inputs = prompt_inputs(state, tokens)
    compile_ahead(lambda: model(inputs, state.layers), device)
    elapsed_ms(lambda: model(inputs, state.layers), device)
    return elapsed_ms(lambda: model(inputs, state.layers), device)
