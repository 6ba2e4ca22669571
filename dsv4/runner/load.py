"""A name or folder becomes a model: config, checkpoint, weights under canonical names."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import CheckpointError
from dsv4.formats.quantized import Weight
from dsv4.model.transformer import Transformer
from dsv4.ops import OPS, choose_ops
from dsv4.runner.settings import Settings, available_memory, resolve

log = logging.getLogger(__name__)

BUILTIN_MODELS = Path(__file__).parent.parent / "models"
STATE_SHARE = 0.25  # of free memory, for the state of sequences

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Loaded:
    model: Transformer
    settings: Settings
    folder: Path


def model_folder(name: str) -> Path:
    """The folder a user means: a path, or a model that comes with the package."""
    embedded = BUILTIN_MODELS / name
    if name.isidentifier() and embedded.is_dir():
        return embedded
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"{name!r} is neither a folder nor an embedded model; expected a folder with "
            f"config.json and safetensors files, or one of: {', '.join(_embedded())}"
        )
    return folder


def _embedded() -> list[str]:
    return sorted(path.name for path in BUILTIN_MODELS.iterdir() if path.is_dir())


def load_model(name: str, choices: EngineConfig, progress: Progress | None = None) -> Loaded:
    folder = model_folder(name)
    config = ModelConfig.from_folder(folder)
    memory = int(available_memory() * STATE_SHARE)
    settings = resolve(choices, config, has_gpu=torch.cuda.is_available(), memory_bytes=memory)
    choose_ops(settings.ops, OPS)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(folder, config)
    for finding in checkpoint.warnings:
        log.warning("%s", finding)
    weights = {}
    for parameter, weight in checkpoint.stream(device=settings.device, progress=progress):
        weights[parameter] = _expand(weight) if settings.device == "cpu" else weight
    seconds = time.perf_counter() - begin
    log.info(
        "%s: %s layout, %d parameters, %.2f GB in %.1f s, %d tensors knowingly ignored",
        folder.name,
        checkpoint.layout,
        len(weights),
        checkpoint.nbytes / 1e9,
        seconds,
        len(checkpoint.ignored),
    )
    model = Transformer(config, weights, getattr(torch, settings.dtype))
    return Loaded(model, settings, folder)


def _expand(weight: Weight) -> Weight:
    """On a CPU the references work on fp32 numbers: unpack once here, not in every step."""
    if isinstance(weight, torch.Tensor):
        return weight.float() if weight.is_floating_point() else weight
    return weight.dequantize(torch.float32)
