"""A model with random weights and a state of random entries, generated on the device.

The shapes are those of `flash` or `pro` with fewer layers. Values are finite and ordinary; they
affect speed only through routing, so the experts that a step really visits are counted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from dsv4.cache.geometry import POOLS, Geometry, Pool
from dsv4.cache.kinds import KINDS, LayerState
from dsv4.checkpoint.names import Parameter, parameters
from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.quantized import Fp8BlockTensor, Weight
from dsv4.formats.spec import FP8_BLOCK
from dsv4.model.transformer import Transformer
from dsv4.ops.gemm.weights.a8 import A8Fp8
from dsv4.ops.kv.begin_step import NEWEST
from dsv4.ops.kv.pool import PagedPool
from dsv4.ops.sample.draft_rows import BLOCK
from dsv4.runner.activations import GROUPS, HOPPER_AUTO, UNROUNDED
from dsv4.runner.buffers import StepBuffers
from dsv4.runner.forward import forward, sample_tokens, sample_verified
from dsv4.runner.step.line import step_line
from dsv4.runner.step.shape import StepShape
from dsv4.tools.bench_ops import random_a8_mxfp4, random_fp4
from dsv4.tools.plan_weights import scheme_named

# official weights: with rows of bf16, and on sm_90 with rows of FP8, everywhere or as by default
WEIGHTS = ("nvfp4", "official", "a8", "auto")
POOL_BYTES = 3 * 10**8  # per layer: many times the L2 cache; sequences share pages


def shape_config(shape: str, layers: int | None) -> ModelConfig:
    """A published shape, or `trial` (four small layers), cut to its first layers."""
    if shape == "trial":
        config = ModelConfig(
            vocab_size=512, hidden_size=64, num_layers=4, num_hash_layers=1, num_heads=4,
            head_dim=32, rope_head_dim=16, q_lora_rank=32, o_groups=1, o_lora_rank=32,
            sliding_window=16, compress_ratios=(0, 128, 4, 128), num_draft_layers=0,
            max_positions=8192, index_num_heads=4, index_head_dim=32, index_topk=16,
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        )  # fmt: skip
    elif shape == "tiny":
        raise OptionError(
            "tiny is a model, not a shape: expected flash, pro or trial; "
            "`dsv4 generate tiny --stats` or `dsv4 bench serve tiny` times it"
        )
    else:
        config = ModelConfig.builtin(shape)
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise OptionError(f"layers is {layers}, {shape} has {config.num_layers}")
    return replace(
        config,
        num_layers=layers,
        num_hash_layers=min(config.num_hash_layers, layers),
        compress_ratios=config.compress_ratios[:layers],
    )


def random_table(config: ModelConfig, device: torch.device) -> dict[str, Weight]:
    """Every parameter under its canonical name; linears as tiled NVFP4, the rest in bf16."""
    return {
        name: random_weight(name, parameter, config, device)
        for name, parameter in parameters(config).items()
    }


def random_weight(
    name: str, parameter: Parameter, config: ModelConfig, device: torch.device
) -> Weight:
    shape = parameter.shape
    if parameter.kind == "table":
        order = torch.rand(shape[0], config.num_experts, device=device)
        return order.topk(shape[1], dim=1).indices.contiguous()
    if parameter.kind == "norm":
        return torch.ones(shape, device=device)
    if parameter.kind == "fp32":
        # a large gate bias would route all tokens to the same experts
        small = len(shape) > 1 or name.endswith("gate.bias")
        return torch.randn(shape, device=device) * (0.02 if small else 0.5)
    if parameter.kind == "plain":
        # logits of standard deviation 5 on normed rows: as peaked as a trained model's
        # and rows that differ enough to choose different experts
        own = {"embed.weight": 16.0, "head.weight": 5.0 * config.hidden_size**-0.5}
        scale = own.get(name, 0.02)
        plain: Tensor = torch.randn(shape, device=device, dtype=torch.bfloat16) * scale
        return plain
    *lead, rows, columns = shape
    count = lead[0] if lead else None
    weight: Weight = random_fp4(rows, columns, count, name.endswith(".w13"), device)
    return weight


def random_model(
    config: ModelConfig, device: torch.device, weights: str = "nvfp4"
) -> tuple[Transformer, dict[str, int]]:
    """The model, and the bytes of each parameter in memory; `weights`: one of WEIGHTS."""
    torch.manual_seed(0)
    if weights == "nvfp4":
        table = random_table(config, device)
    else:
        table = {
            name: official_weight(name, parameter, config, device, groups_with_a8(weights))
            for name, parameter in parameters(config).items()
        }
    sizes = {name: weight.nbytes for name, weight in table.items()}
    return Transformer(config, table, torch.bfloat16), sizes


def groups_with_a8(weights: str) -> Collection[str]:
    """Groups whose rows have few bits."""
    if weights == "auto":
        return [group for group, width in HOPPER_AUTO.items() if width == "a8"]
    return GROUPS if weights == "a8" else ()


def official_weight(
    name: str,
    parameter: Parameter,
    config: ModelConfig,
    device: torch.device,
    a8: Collection[str] = (),
) -> Weight:
    """In the format of the official checkpoint. `a8`: groups with FP8 rows on sm_90, in the
    matrices where the engine has them."""
    *lead, rows, columns = (0, *parameter.shape)
    label = scheme_named("official").format_of(name, parameter)
    if parameter.kind != "linear" or label not in ("mxfp4", "fp8", "bf16"):
        return random_weight(name, parameter, config, device)
    sizes = rows, columns, lead[-1], name.endswith("w13"), device
    if label == "mxfp4" and parameter.group in a8:
        return random_a8_mxfp4(*sizes)
    if label == "mxfp4":
        weight: Weight = random_fp4(*sizes, mx=True)
        return weight
    if label == "bf16":
        return 0.02 * torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    codes = torch.randint(0, 120, (rows, columns), dtype=torch.uint8, device=device)
    codes |= torch.randint_like(codes, 0, 2) << 7
    values = codes.view(torch.float8_e4m3fn)
    grid = ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK)
    if parameter.group in a8 and not name.endswith(UNROUNDED):
        return A8Fp8(values, torch.full(grid, 2.0**-13, device=device))
    scale = torch.full(grid, 114, dtype=torch.uint8, device=device)  # 2^-13
    return Fp8BlockTensor(values, scale, FP8_BLOCK)


@dataclass(frozen=True)
class FilledState:
    """State as if `batch` sequences of `context` tokens were running."""

    layers: list[LayerState]
    buffers: StepBuffers
    geometry: Geometry
    width: int = 1  # rows of each sequence in a step: its newest token and drafts

    @property
    def shape(self) -> StepShape:
        """The shape of a decode step of all sequences."""
        batch, context = self.buffers.max_sequences, self.buffers.contexts[-1]
        one_each = self.width == 1
        return StepShape(batch * self.width, batch, context, one_each, width=self.width)

    def tables(self) -> tuple[Tensor, ...]:
        """`[sequences, columns]`, of window, csa and hca."""
        slots = self.buffers.slot_tables
        return tuple(slots.table(index, self.buffers.max_sequences) for index in range(len(POOLS)))


def filled_state(
    config: ModelConfig,
    batch: int,
    context: int,
    device: torch.device,
    chunk_tokens: int = 64,
    width: int = 1,
) -> FilledState:
    """Pages are drawn at random from pools that may be smaller than all sequences together."""
    geometry = Geometry(config, "fp8", "fp4", chunk_tokens)
    buffers = StepBuffers(geometry, batch, context, device, width - 1)
    buffers.contexts = [context]
    num_pages = {}
    for index, pool in enumerate(POOLS):
        table = buffers.slot_tables.table(index, batch)
        num_pages[pool] = _num_pages(geometry, pool, table.numel())
        pages = torch.randperm(num_pages[pool], device=device)
        repeats = -(-table.numel() // num_pages[pool])  # sequences share pages if there are few
        table.copy_(pages.repeat(repeats)[: table.numel()].view(table.shape))
    layers: list[LayerState] = [
        KINDS[kind].allocate(geometry, batch, num_pages, str(device)) for kind in config.kinds
    ]
    for layer in layers:
        for _, paged in layer.pools():
            fill(paged)
    return FilledState(layers, buffers, geometry, width)


def _num_pages(geometry: Geometry, pool: Pool, wanted: int) -> int:
    per_layer = geometry.page_bytes(pool) // max(geometry.num_layers(pool), 1)
    return max(1, min(wanted, POOL_BYTES // max(per_layer, 1)))


def fill(pool: PagedPool) -> None:
    """Random codes except NaN, scales near one."""
    codes = pool.data.view(torch.uint8)
    if pool.format == "fp4":
        codes.random_(0, 256)
    else:
        codes.random_(0, 120)
        codes.bitwise_or_(torch.randint_like(codes, 0, 2) << 7)
    scale = pool.parts["scale"]
    if scale.dtype == torch.uint8:
        scale.random_(119, 122)
    else:
        scale.fill_(0.01)
    if "tail" in pool.parts:
        pool.parts["tail"].normal_()


def start_at(state: FilledState, position: int, *, same: bool = False) -> None:
    """Every sequence reads a random token at `position` next, with default sampling. Drafts are
    random too, or all the `same` token, and then visit the same experts."""
    buffers, batch = state.buffers, state.buffers.max_sequences
    vocab_size, width = state.geometry.config.vocab_size, state.width
    buffers.step.line.zero_()
    at = step_line(state.shape).views(buffers.step.line)
    at["slots"].copy_(torch.arange(batch))
    buffers.newest.random_(0, vocab_size)
    if width > 1:
        position = position // BLOCK * BLOCK  # all rows fit into a block
        at["most"].fill_(position + width)
        at["token_ids"].random_(0, vocab_size)
        if same:
            at["token_ids"].copy_(at["token_ids"][::width].repeat_interleave(width))
    else:
        at["ends"].fill_(position + 1)
        at["token_ids"].fill_(NEWEST)
    at["starts"].fill_(position)
    settings = buffers.sampling(batch)
    settings.temperature.fill_(1.0)
    settings.top_p.fill_(0.95)
    settings.repetition.fill_(1.0)
    settings.seeds.copy_(torch.arange(batch))
    settings.slots.copy_(torch.arange(batch))


def decode_step(model: Transformer, layers: Sequence[LayerState], state: FilledState) -> None:
    """Decode one token per sequence; positions advance by one. With drafts they stay."""
    forward(model, layers, state.buffers, state.shape)
    if state.width > 1:
        sample_verified(state.buffers, state.shape)
        return
    sample_tokens(state.buffers, state.shape.tokens)
    line = step_line(state.shape)
    first, (last, count) = line.parts["starts"][0], line.parts["ends"]
    state.buffers.step.line[first : last + count] += 1


def step_bytes(
    config: ModelConfig, sizes: dict[str, int], batch: int, context: int, visited: float
) -> dict[str, float]:
    """Bytes that a decode step must read, by op family; `visited`: the share of experts used."""
    found = dict.fromkeys(("linear", "head", "experts", "router", "mhc", "attention", "index"), 0.0)
    for name, size in sizes.items():
        if ".ffn.experts." in name:
            found["experts"] += size * visited
        elif "shared_experts" in name:
            found["experts"] += size
        elif name == "head.weight":
            found["head"] += size
        elif name != "embed.weight" and "tid2eid" not in name:
            family = "router" if ".gate." in name else "mhc" if "hc_" in name else "linear"
            found[family] += size
    geometry = Geometry(config, "fp8", "fp4", 64)
    entry, key = geometry.kv_entry_bytes(), geometry.index_entry_bytes()
    for kind in config.kinds:
        seen = min(context, config.sliding_window)
        if kind == "hca":
            seen += context // 128
        elif kind == "csa":
            seen += min(context // 4, config.index_topk)
            found["index"] += batch * key * (context // 4)
        found["attention"] += batch * entry * seen
    return found


def prefill_flops(
    config: ModelConfig, tokens: int, position: int = 0, *, a8: Collection[str] = ()
) -> float:
    """FLOPs of a prompt's tokens from `position` on: products with weights, and attention over the
    average number of visible entries. `a8`: groups with FP8 products, which are twice as fast and
    count half; those of `wo_a`, compressors and the indexer stay as they are."""
    c = config
    weights, (rate, shared, routed) = 0.0, (0.5 if group in a8 else 1.0 for group in GROUPS)
    middle = position + tokens / 2
    for kind in c.kinds:
        weights += rate * c.q_lora_rank * (c.hidden_size + c.num_heads * c.head_dim)
        weights += rate * c.hidden_size * c.head_dim
        weights += c.o_lora_rank * (c.num_heads * c.head_dim + rate * c.o_groups * c.hidden_size)
        if kind == "hca":
            weights += 2 * c.hidden_size * c.head_dim
        if kind == "csa":
            weights += 4 * c.hidden_size * (c.head_dim + c.index_head_dim)
            weights += c.q_lora_rank * c.index_num_heads * c.index_head_dim
        weights += c.num_experts * c.hidden_size
        chosen = routed * c.num_experts_per_tok + shared
        weights += 3 * chosen * c.hidden_size * c.moe_intermediate_size
    flops = 2.0 * tokens * weights
    for kind in c.kinds:
        seen = float(min(position + tokens, c.sliding_window))
        if kind == "hca":
            seen += middle / 128
        elif kind == "csa":
            seen += min(middle / 4, c.index_topk)
            flops += tokens * middle / 4 * c.index_num_heads * c.index_head_dim * 2
        flops += tokens * seen * c.num_heads * c.head_dim * 4
    return flops
