"""A name or folder becomes a model: config, checkpoint, weights under canonical names."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.model.transformer import Transformer
from dsv4.ops import OPS, choose_ops
from dsv4.runner.settings import Settings, available_memory, resolve
from dsv4.util.models import model_folder

log = logging.getLogger(__name__)

STATE_SHARE = 0.25  # of free memory, for the state of sequences

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Loaded:
    model: Transformer
    settings: Settings
    folder: Path


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
