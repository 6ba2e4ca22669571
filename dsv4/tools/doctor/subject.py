"""The subject of an examination: an engine's runner with its model, and independently read weights.

A model that does not fit into memory is *streamed*: its blocks are read from disk one at a time, as
the model reaches them, and dropped again. The engine's code is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from random import Random
from typing import overload

import torch

from dsv4.chat.tokenizer import Tokenizer
from dsv4.checkpoint.rank_slices import Selection
from dsv4.checkpoint.reader import Checkpoint, open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.quantized import Weight
from dsv4.model.exchange import Exchange
from dsv4.model.mhc import mix_site
from dsv4.model.transformer import Block, Transformer
from dsv4.model.weights import Weights
from dsv4.ops import engine_ops
from dsv4.parallel.comm import SingleRankComm
from dsv4.parallel.layout import RankLayout
from dsv4.runner.activations import GpuFacts, width_of
from dsv4.runner.load import find_gpu, read_weights, tell_activations
from dsv4.runner.runner import Runner
from dsv4.runner.settings import Settings, available_memory, resolve, wants_one_thread
from dsv4.tools.doctor.plain.layer import Formats
from dsv4.tools.doctor.plain.weights import PlainWeights
from dsv4.util.models import model_folder

NUM_DECODED = 5  # last tokens of a run: the end of a block of 128, then a block of 4
NUM_SEQUENCES = 3  # batched in the cross-checks
PROMPT = (
    "Two trains leave a station at nine. One runs north at 90 km/h, the other east at 120. "
    "Where are they at noon, and how far apart? Explain each step, then check the answer. "
)


@dataclass(frozen=True)
class Subject:
    name: str
    config: ModelConfig
    settings: Settings
    model: Transformer
    weights: PlainWeights  # that count as correct
    token_ids: list[int]
    layout: str = "in memory"
    streamed: bool = False
    examined: PlainWeights | None = None  # the engine's own file, if another counts as correct
    widths: dict[str, str] = field(default_factory=dict)  # of weights with rounded inputs
    graphs: bool = False  # whether the engine would serve decode steps as CUDA graphs

    @property
    def formats(self) -> Formats:
        s, lossy = self.settings, self.examined is not None
        dtype = getattr(torch, s.dtype)
        return Formats(dtype, s.kv_format, s.index_format, lossy, self.widths)

    @property
    def summary(self) -> str:
        """The settings that affect numbers; nothing about the machine."""
        names = ("device", "dtype", "kv_format", "index_format", "ops")
        values = [f"{name}={getattr(self.settings, name)}" for name in names]
        return ", ".join([*values, f"activations={self.settings.activations_text}"])

    def runner(self) -> Runner:
        """A fresh state; the model is shared."""
        return Runner(self.model, self.settings)


def num_tokens(config: ModelConfig, wanted: int | None) -> int:
    """Enough to move windows, close two blocks of 128 and make the indexer select."""
    least = max(256, config.sliding_window + 64, 4 * (config.index_topk + 8))
    count = wanted or -(-least // 128) * 128 + 4
    if not NUM_DECODED + 2 <= count <= config.max_positions:
        raise OptionError(
            f"{count} tokens asked for, expected {NUM_DECODED + 2} to {config.max_positions}"
        )
    return count


def make_settings(
    config: ModelConfig, choices: EngineConfig, count: int, gpu: GpuFacts | None = None
) -> Settings:
    """The user's settings, with the state of a few sequences of `count` tokens."""
    fixed = {
        "max_context": count,
        "max_sequences": NUM_SEQUENCES,
        "chunk_tokens": NUM_SEQUENCES * count,
        "cuda_graphs": False,
    }
    changed = EngineConfig.make(**{**vars(choices), **fixed})
    return resolve(
        changed,
        config,
        has_gpu=torch.cuda.is_available(),
        memory_bytes=available_memory() // 2,
        gpu=gpu,
    )


def open_subject(
    name: str,
    choices: EngineConfig,
    *,
    prompt: str | None = None,
    tokens: int | None = None,
    stream: bool | None = None,
    against: str | None = None,
) -> Subject:
    """`stream` None: if the weights do not fit. `against`: a second checkpoint of the same model
    whose weights count as correct."""
    folder = model_folder(name)
    config = ModelConfig.from_folder(folder)
    checkpoint = open_checkpoint(folder, config)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(folder)
    token_ids = prompt_ids(config, tokenizer, prompt, tokens)
    gpu = find_gpu(choices.device, checkpoint)
    settings = make_settings(config, choices, len(token_ids), gpu)
    if wants_one_thread(settings.device, config):
        torch.set_num_threads(1)
    with engine_ops(settings.ops).active():
        tell_activations(checkpoint, choices.activations, gpu)
    if stream is None:
        stream = _needed_bytes(checkpoint, settings) > 0.6 * _free_bytes(settings)
    dtype = getattr(torch, settings.dtype)
    if stream:
        model: Transformer = StreamedTransformer(checkpoint, settings)
    else:
        model = Transformer(config, read_weights(checkpoint, settings), dtype)
    weights, examined = PlainWeights.from_checkpoint(checkpoint), None
    if against is not None:
        other = model_folder(against)
        right = open_checkpoint(other, ModelConfig.from_folder(other))
        _same_shape(config, right.config, against)
        weights, examined = PlainWeights.from_checkpoint(right), weights
    widths = {n: width_of(source, settings.activations) for n, source in checkpoint.sources.items()}
    return Subject(
        folder.name,
        config,
        settings,
        model,
        weights,
        token_ids,
        checkpoint.layout,
        stream,
        examined,
        {name: width for name, width in widths.items() if width != "a16"},
        choices.cuda_graphs and settings.device != "cpu",
    )


def prompt_ids(
    config: ModelConfig, tokenizer: Tokenizer | None, prompt: str | None, tokens: int | None
) -> list[int]:
    """The prompt, repeated to the required length; without a tokenizer a fixed mixture."""
    if prompt is not None and tokenizer is None:
        raise OptionError("this checkpoint has no tokenizer.json; leave the prompt out")
    count = num_tokens(config, tokens)
    if tokenizer is None:
        rng = Random(0)
        return [rng.randrange(config.vocab_size) for _ in range(count)]
    ids = tokenizer.encode(PROMPT if prompt is None else prompt)
    if not ids:
        raise OptionError("the prompt is empty; give some text")
    repeated = chain.from_iterable(repeat(ids))
    return [config.bos_id, *(next(repeated) for _ in range(count - 1))]


def _same_shape(config: ModelConfig, other: ModelConfig, name: str) -> None:
    for fact in ("num_layers", "hidden_size", "compress_ratios", "num_experts", "vocab_size"):
        a, b = getattr(config, fact), getattr(other, fact)
        if a != b:
            raise OptionError(f"{name} has {fact} {b}, the examined model {a}; give the same model")


def _needed_bytes(checkpoint: Checkpoint, settings: Settings) -> int:
    if settings.device != "cpu":
        return checkpoint.nbytes
    shapes = (source.parameter.shape for source in checkpoint.sources.values())
    return sum(4 * torch.Size(shape).numel() for shape in shapes)  # most of them in fp32


def _free_bytes(settings: Settings) -> int:
    if settings.device == "cpu":
        return available_memory()
    return int(torch.cuda.mem_get_info(settings.device)[0])


class StreamedBlocks(Sequence[Block]):
    """The blocks of a checkpoint, read on demand; only the last one is held."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        self._checkpoint, self._settings = checkpoint, settings
        self._loaded: tuple[int, Block] | None = None

    def __len__(self) -> int:
        return self._checkpoint.config.num_layers

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = None  # free one before loading the next
            prefix = f"layers.{index}."
            select = Selection(layers=range(index, index + 1))
            table = read_weights(self._checkpoint, self._settings, select)
            own: dict[str, Weight] = {n: w for n, w in table.items() if n.startswith(prefix)}
            weights = Weights(own).under(prefix)
            config = self._checkpoint.config
            ratio, hashed = config.compress_ratios[index], index < config.num_hash_layers
            self._loaded = (index, Block(config, ratio, weights, RankLayout(), hashed=hashed))
        return self._loaded[1]


class StreamedTransformer(Transformer):
    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        config = checkpoint.config
        names = {n for n, source in checkpoint.sources.items() if source.layer is None}
        weights = Weights(read_weights(checkpoint, settings, Selection(names=frozenset(names))))
        self.config = config
        self.dtype = getattr(torch, settings.dtype)
        self.embedding = weights.tensor("embed.weight")
        self.exchange = Exchange(RankLayout(), SingleRankComm(), config)
        self.head = weights.tensor("head.weight")
        self.head_site = mix_site(config, weights, "hc_head", "norm")
        self.blocks = StreamedBlocks(checkpoint, settings)  # type: ignore[assignment]
