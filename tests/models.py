"""Small checkpoints on disk for tests: a model of every layer kind that answers in milliseconds."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

from dsv4 import Engine
from dsv4.config import ModelConfig
from dsv4.scheduler.drafts import Drafting, StepTimes
from dsv4.testing import random_weights, small_config, write_checkpoint

# every byte is a token, then V4's markers under their real spellings
BYTE_TOKENIZER = Path(__file__).parent / "byte_tokenizer.json"


def fast_config() -> ModelConfig:
    """Three layers, one of each kind; the vocabulary of the byte tokenizer."""
    return small_config(
        vocab_size=271,
        num_layers=3,
        num_hash_layers=1,
        compress_ratios=(0, 128, 4),
        sliding_window=16,
        bos_id=256,
        eos_ids=(257,),
    )


def write_fast_model(folder: Path, *, tokenizer: bool = True) -> Path:
    config = fast_config()
    write_checkpoint(folder, config, random_weights(config, 0))
    if tokenizer:
        shutil.copy(BYTE_TOKENIZER, folder / "tokenizer.json")
    return folder


def quick_config() -> ModelConfig:
    """The least work that still has all kinds of state: for tests that need many steps."""
    return small_config(
        vocab_size=271,
        hidden_size=32,
        num_layers=2,
        num_hash_layers=0,
        compress_ratios=(128, 4),
        num_heads=2,
        head_dim=16,
        rope_head_dim=8,
        index_num_heads=2,
        q_lora_rank=16,
        o_groups=1,
        sliding_window=16,
        num_experts=2,
        num_experts_per_tok=1,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        bos_id=256,
        eos_ids=(257,),
    )


def write_quick_model(folder: Path) -> Path:
    config = quick_config()
    write_checkpoint(folder, config, random_weights(config, 0))
    shutil.copy(BYTE_TOKENIZER, folder / "tokenizer.json")
    return folder


@contextmanager
def spoiled(engine: Engine, token: int, value: float = math.nan) -> Iterator[None]:
    """A damaged checkpoint: the embedding of one token is NaN."""
    row = engine._runner.model.embedding[token]
    kept = row.clone()
    row.fill_(value)
    yield
    row.copy_(kept)


def verify_everything(drafting: Drafting) -> None:
    """Where rows cost nothing, every draft is taken."""
    drafting.times, drafting.plain = StepTimes({1: 1.0, 64: 1.0}), StepTimes()
    drafting.time_step = Mock()  # type: ignore[method-assign]
    drafting._rest, drafting._waits = 0, False
