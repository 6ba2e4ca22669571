"""DSpark against the mathematics in fp32; mistakes that others made would be seen."""

import random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint.names import draft_parameters
from dsv4.config import ModelConfig
from dsv4.model.draft import DSpark
from dsv4.testing import _random_tensor, random_weights, small_config
from dsv4.util.draft_shape import DSparkShape
from tests.oracle.drafts import difference, engine_drafts
from tests.oracle.plain_block import (
    ROPES,
    backbone,
    block,
    head_mix,
    norm,
    window_key,
    wrong_rope,
)

SHAPE = DSparkShape(block=5, noise_id=90, targets=(0, 2, 1), rank=8)
CONFIG = small_config(
    num_layers=3, compress_ratios=(0, 0, 0), num_hash_layers=1, num_draft_layers=3,
    draft_kind="dspark", dspark=SHAPE,
)  # fmt: skip
LENGTH = 70
TOLERANCE, VISIBLE = 2e-4, 0.02
GENERATOR = torch.Generator().manual_seed(4)
WEIGHTS = random_weights(CONFIG, 3)
DRAFTS = {
    name: _random_tensor(name, parameter, CONFIG, GENERATOR)
    for name, parameter in draft_parameters(CONFIG).items()
}
IDS = random.Random(1).choices(range(CONFIG.vocab_size), k=LENGTH + 1)
W = {**WEIGHTS, **DRAFTS}


@pytest.fixture(scope="module")
def outputs() -> list[Tensor]:
    """Streams before the first block of the model and after each."""
    return backbone(W, IDS[:LENGTH], CONFIG)


def context_keys(outputs: list[Tensor], variant: str, c: ModelConfig) -> list[list[Tensor]]:
    """Of each stage, those that a block behind the last token sees; `c` says how they turn."""
    after = 0 if variant == "inputs of the blocks" else 1
    taps = torch.cat([outputs[t + after].mean(1) for t in SHAPE.targets], 1)
    z = norm(taps @ W["mtp.0.main_proj.weight"].T, W["mtp.0.main_norm.weight"], CONFIG.rms_norm_eps)
    first = max(0, LENGTH - CONFIG.sliding_window)
    first += {"a key too few": 1, "a key too many": -1}.get(variant, 0)
    late = variant == "keys a position too far"
    return [
        [window_key(W, f"mtp.{i}.", z[p], p + late, c) for p in range(first, LENGTH)]
        for i in range(3)
    ]


def truth(outputs: list[Tensor], drafts: list[int], variant: str = "") -> list[Tensor]:
    """Logits that each draft is drawn from, and the chances, all given the drafts before."""
    c, rows = CONFIG, 7 if variant == "seven rows" else SHAPE.block
    ids = [IDS[LENGTH], *[SHAPE.noise_id] * (rows - 1)]
    streams = W["embed.weight"][ids].unsqueeze(1).expand(-1, c.hc_mult, -1)
    positions = [LENGTH + j + (variant == "rows a position too far") for j in range(rows)]
    back = float(LENGTH + rows - 1) if variant == "turned back at the last row" else None
    hashed = W["layers.0.ffn.gate.tid2eid"][ids] if variant == "hashed" else None

    def visible(row: int) -> range:
        return range(row + 1 if variant == "causal" else rows)

    with wrong_rope(variant, c) as turned:
        keys = context_keys(outputs, variant, turned)
        for i in range(3):
            streams = block(
                W, f"mtp.{i}.", streams, positions, turned, visible, keys[i], hashed=hashed,
                back=back,
            )  # fmt: skip
    hidden = head_mix(W, "mtp.2.", streams, c)
    normed = norm(hidden, W["mtp.2.norm.weight"], c.rms_norm_eps)
    base = normed @ W["head.weight"].T
    m1, m2 = (W[f"mtp.2.markov_head.markov_w{i}.weight"] for i in (1, 2))
    before = m1[[IDS[LENGTH], *drafts[:-1]]]
    bias = before @ m2.T
    if variant == "no bias from the newest token":
        bias[0] = 0.0
    if variant == "chances of normed rows":
        hidden = normed
    row = torch.cat((hidden[:5], before), 1)
    chances = torch.sigmoid(row @ W["mtp.2.confidence_head.proj.weight"][0])
    return [*(base[:5] + bias), chances]


def engine(chunk: int) -> tuple[list[int], list[Tensor]]:
    logits, real = list[Tensor](), DSpark.after

    def recorded(self: DSpark, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        result = real(self, *arguments)
        logits.append(result[0][0])
        return result

    with patch.object(DSpark, "after", recorded):
        found = engine_drafts(CONFIG, WEIGHTS, DRAFTS, IDS, chunk, 5)
    return found.token_ids, [*logits, torch.tensor(found.chances)]


@pytest.fixture(scope="module")
def drafted() -> tuple[list[int], list[Tensor]]:
    return engine(256)


def test_a_block_of_drafts(outputs: list[Tensor], drafted: tuple[list[int], list[Tensor]]) -> None:
    tokens, found = drafted
    wanted = truth(outputs, tokens)
    assert difference(found, wanted) < TOLERANCE
    assert [int(row.argmax()) for row in wanted[:5]] == tokens


def test_drafts_do_not_depend_on_chunks(drafted: tuple[list[int], list[Tensor]]) -> None:
    tokens, found = engine(23)
    assert tokens == drafted[0]
    assert difference(found, drafted[1]) == 0.0


@pytest.mark.parametrize(
    "variant",
    ["inputs of the blocks", "a key too few", "a key too many", "keys a position too far",
     "rows a position too far", "turned back at the last row", "causal", "seven rows", "hashed",
     *ROPES, "no bias from the newest token", "chances of normed rows"],
)  # fmt: skip
def test_wrong_variants_are_far_off(
    variant: str, outputs: list[Tensor], drafted: tuple[list[int], list[Tensor]]
) -> None:
    tokens, found = drafted
    assert difference(found, truth(outputs, tokens, variant)) > VISIBLE
