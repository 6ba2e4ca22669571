"""Small checkpoints on disk for tests: a model of every layer kind that answers in milliseconds."""

import shutil
from pathlib import Path

from dsv4.config import ModelConfig
from dsv4.testing import random_weights, small_config, write_checkpoint
from dsv4.util.models import BUILTIN_MODELS


def fast_config() -> ModelConfig:
    """Three layers, one of each kind; the vocabulary of the embedded model's tokenizer."""
    return small_config(
        vocab_size=271,
        num_layers=3,
        num_hash_layers=1,
        compress_ratios=(0, 128, 4),
        sliding_window=16,
        bos_id=256,
        eos_id=257,
    )


def write_fast_model(folder: Path, *, tokenizer: bool = True) -> Path:
    config = fast_config()
    write_checkpoint(folder, config, random_weights(config, 0))
    if tokenizer:
        shutil.copy(BUILTIN_MODELS / "tiny" / "tokenizer.json", folder)
    return folder
