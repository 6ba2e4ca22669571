"""The MTP block against the mathematics in fp32, for one draft and for a chain of them.

The truth shares nothing with the engine (`plain_block.py`). The wrong variants that other engines
had are computed in the same way and must be far off.
"""

import random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint.names import draft_parameters
from dsv4.config import ModelConfig
from dsv4.model.attention import layer_frequencies
from dsv4.model.draft import MtpBlock
from dsv4.ops.mhc.mix import Residual
from dsv4.testing import _random_tensor, random_weights, small_config
from tests.oracle.drafts import difference, engine_drafts
from tests.oracle.plain_block import (
    ROPES,
    backbone,
    block,
    head_mix,
    norm,
    rates,
    window,
    wrong_rope,
    yarn_rates,
)

CONFIG = small_config(num_layers=2, compress_ratios=(0, 0), num_hash_layers=1, num_draft_layers=1)
LENGTH, CHAIN = 70, 3
TOLERANCE, VISIBLE = 2e-4, 0.02


def all_weights(config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's and the draft block's."""
    generator = torch.Generator().manual_seed(4)
    drafts = {
        name: _random_tensor(name, parameter, config, generator)
        for name, parameter in draft_parameters(config).items()
    }
    return random_weights(config, 3), drafts


WEIGHTS, DRAFTS = all_weights(CONFIG)
IDS = random.Random(1).choices(range(CONFIG.vocab_size), k=LENGTH + 1)


# --- the truth ------------------------------------------------------------------------------------


class Truth:
    """Streams of the first LENGTH tokens, and the block above them."""

    def __init__(self) -> None:
        self.table = {**WEIGHTS, **DRAFTS}
        self.streams = backbone(self.table, IDS[:LENGTH], CONFIG)[-1]

    def logits(self, tokens: list[int], variant: str = "") -> list[Tensor]:
        """After IDS, for each of `tokens`, the chain's drafts: logits of the token behind it."""
        streams, following, found, w = self.streams, IDS[1:LENGTH], [], self.table
        for token in (IDS[LENGTH], *tokens):
            following = [*following, token]
            above = self._block(streams, following, variant)
            hidden = head_mix(w, "mtp.0.", above, CONFIG)
            normed = norm(hidden, w["mtp.0.norm.weight"], CONFIG.rms_norm_eps)
            found.append((normed @ w["head.weight"].T)[0])
            streams = torch.cat((streams, above))  # the next row is at the next position
        return found

    def _block(self, streams: Tensor, tokens: list[int], variant: str) -> Tensor:
        """Streams of the last row."""
        w, c, last = self.table, CONFIG, len(tokens) - 1
        e = norm(w["embed.weight"][tokens], w["mtp.0.enorm.weight"], c.rms_norm_eps)
        h = streams
        if variant == "streams collapsed first":
            h = h.mean(1, keepdim=True).expand_as(h)
        h = norm(h, w["mtp.0.hnorm.weight"], c.rms_norm_eps)
        e_proj, h_proj = w["mtp.0.e_proj.weight"], w["mtp.0.h_proj.weight"]
        if variant == "e and h swapped":
            e_proj, h_proj = h_proj, e_proj
        start = (e @ e_proj.T).unsqueeze(1) + h @ h_proj.T
        positions = [float(position) for position in range(len(tokens))]
        if variant == "a position too far":  # of the newest row, not of its keys
            positions[last] += 1
        hashed = w["layers.0.ffn.gate.tid2eid"][tokens] if variant == "hashed" else None
        with wrong_rope(variant, c) as c:
            return block(w, "mtp.0.", start, positions, c, window(c), wanted=[last], hashed=hashed)


# --- the engine -----------------------------------------------------------------------------------


def drafts_of(chunk: int) -> tuple[list[int], list[Tensor]]:
    """A chain of drafts after a prompt in chunks, and the logits that each was drawn from."""
    logits, real = list[Tensor](), MtpBlock.__call__

    def recorded(self: MtpBlock, *arguments: object) -> tuple[Tensor, Residual]:
        result = real(self, *arguments)  # type: ignore[arg-type]
        logits.append(result[0][0])
        return result

    with patch.object(MtpBlock, "__call__", recorded):
        found = engine_drafts(CONFIG, WEIGHTS, DRAFTS, IDS, chunk, CHAIN)
    return found.token_ids, logits


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def drafted() -> tuple[list[int], list[Tensor]]:
    return drafts_of(256)


def test_a_chain_of_drafts(truth: Truth, drafted: tuple[list[int], list[Tensor]]) -> None:
    tokens, logits = drafted
    wanted = truth.logits(tokens[:-1])
    assert difference(logits, wanted) < TOLERANCE
    assert [int(row.argmax()) for row in wanted] == tokens


def test_drafts_do_not_depend_on_chunks(drafted: tuple[list[int], list[Tensor]]) -> None:
    for chunk in (64, 23):
        tokens, logits = drafts_of(chunk)
        assert tokens == drafted[0]
        assert difference(logits, drafted[1]) == 0.0


def test_the_wrong_rope_is_that_of_compressed_layers() -> None:
    for config in (CONFIG, ModelConfig()):
        wrong = torch.tensor(yarn_rates(config, config.compress_rope_theta))
        right = torch.tensor(rates(config, config.rope_theta))
        assert (wrong / layer_frequencies(config, 4) - 1).abs().max() < 1e-5
        assert (right / layer_frequencies(config, 0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    "variant",
    [
        "streams collapsed first",
        "e and h swapped",
        *ROPES,
        "a position too far",
        "hashed",
    ],
)
def test_wrong_variants_are_far_off(
    variant: str, truth: Truth, drafted: tuple[list[int], list[Tensor]]
) -> None:
    tokens, logits = drafted
    assert difference(logits, truth.logits(tokens[:-1], variant)) > VISIBLE
