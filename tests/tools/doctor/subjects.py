"""Small models to examine."""

import random
from typing import Any

import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.transformer import Transformer
from dsv4.testing import random_weights, small_config
from dsv4.tools.doctor.plain.weights import PlainWeights
from dsv4.tools.doctor.subject import Subject, make_settings

NUM_TOKENS = 132  # a block of 128 closes while decoding
SMALL = {
    "num_layers": 3,
    "compress_ratios": (0, 4, 128),
    "num_hash_layers": 1,
    "num_experts": 4,
    "hc_sinkhorn_iters": 4,
}


def make_subject(
    config: ModelConfig,
    seed: int = 1,
    *,
    nasty: bool = False,
    tokens: int = NUM_TOKENS,
    **choices: Any,
) -> Subject:
    weights = random_weights(config, seed, nasty=nasty)
    settings = make_settings(config, EngineConfig.make(device="cpu", **choices), tokens)
    model = Transformer(config, weights, getattr(torch, settings.dtype))
    rng = random.Random(seed)
    ids = [rng.randrange(config.vocab_size) for _ in range(tokens)]
    return Subject("random", config, settings, model, PlainWeights.from_tensors(weights), ids)


def small_subject(
    *, nasty: bool = False, changes: dict[str, Any] | None = None, **choices: Any
) -> Subject:
    config = small_config(**{**SMALL, **(changes or {})})
    return make_subject(config, nasty=nasty, **choices)
