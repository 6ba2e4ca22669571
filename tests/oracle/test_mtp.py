"""The MTP block against plain formulas in fp32, for one draft and for a chain of them.

The truth is written down below from the mathematics; of the network that was trained (plain torch,
independent of the engine) it takes the ordinary block and the head. The wrong variants that other
engines had are computed in the same way and must be far off.
"""

import random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dsv4.checkpoint.names import draft_parameters
from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.draft import MtpBlock
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams
from dsv4.runner.drafts.device import Newest
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.sampling import SamplingRow
from dsv4.testing import _random_tensor, random_weights, small_config
from training.network import Network, Options, Result, rms
from training.rope import rotations

CONFIG = small_config(
    num_layers=3, compress_ratios=(0, 128, 0), num_hash_layers=1, num_draft_layers=1
)
LENGTH, CHAIN = 200, 3
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
    """Streams of the first LENGTH tokens by the trained network, and the block above them."""

    def __init__(self) -> None:
        self.table = {**WEIGHTS, **DRAFTS}
        self.network, self.options = Network(CONFIG), Options()
        padded = torch.tensor([IDS[:LENGTH] + [0] * (256 - LENGTH)])
        with torch.no_grad():
            self.streams = self.network.forward(self.table, padded, self.options, None).layers[-1]
        self.streams = self.streams[:LENGTH]

    def logits(self, tokens: list[int], variant: str = "") -> list[Tensor]:
        """After IDS, for each of `tokens`, the chain's drafts: logits of the token behind it."""
        streams, following, found = self.streams, IDS[1:LENGTH], []
        for token in (IDS[LENGTH], *tokens):
            following = [*following, token]
            above = self._block(streams, following, variant)
            head = self.network._head(self.table, "mtp.0.", above)
            found.append((head @ self.table["head.weight"].T)[0])
            streams = torch.cat((streams, above))  # the next row is at the next position
        return found

    def _block(self, streams: Tensor, tokens: list[int], variant: str) -> Tensor:
        """Streams of the last row; rows behind it fill the last window and are not seen."""
        w, c, count = dict(self.table), CONFIG, len(tokens)
        missing = -count % c.sliding_window
        following = torch.tensor([*tokens, *[0] * missing])
        streams = torch.cat((streams, streams.new_ones(missing, *streams.shape[1:])))
        e = rms(w["embed.weight"][following], w["mtp.0.enorm.weight"], c.rms_norm_eps)
        h = streams
        if variant == "streams collapsed first":
            h = h.mean(1, keepdim=True).expand_as(h)
        h = rms(h, w["mtp.0.hnorm.weight"], c.rms_norm_eps)
        e_proj, h_proj = w["mtp.0.e_proj.weight"], w["mtp.0.h_proj.weight"]
        if variant == "e and h swapped":
            e_proj, h_proj = h_proj, e_proj
        start = (e @ e_proj.T).unsqueeze(1) + h @ h_proj.T
        positions = torch.arange(len(following))
        if variant == "a position too far":  # of the newest row, not of its keys
            positions[count - 1] += 1
        rope = rotations(c, 128 if variant == "YaRN" else 0, positions, "", 1)
        if variant == "hashed":
            w["mtp.0.ffn.gate.tid2eid"] = w["layers.0.ffn.gate.tid2eid"]
        ids = following.unsqueeze(0)
        result = Result(e, None, e.new_zeros(2))
        with torch.no_grad():
            made = self.network._block(w, "mtp.0.", start, ids, 0, rope, self.options, None, result)
        return made[count - 1 : count]


# --- the engine -----------------------------------------------------------------------------------


def engine_drafts(chunk: int) -> tuple[list[int], list[Tensor]]:
    """A chain of drafts after a prompt in chunks, and the logits that each was drawn from."""
    choices = EngineConfig(
        device="cpu", max_sequences=2, max_context=512, chunk_tokens=256, draft="mtp",
        draft_tokens=CHAIN,
    )  # fmt: skip
    settings = resolve(choices, CONFIG, has_gpu=False, memory_bytes=2**32)
    model = Transformer(CONFIG, WEIGHTS, torch.float32)
    runner = Runner(model, settings, draft=MtpBlock(model, DRAFTS))
    pages, logits = runner.pages.open(), list[Tensor]()
    real = MtpBlock.__call__

    def recorded(self: MtpBlock, *arguments: object) -> tuple[Tensor, Tensor]:
        result = real(self, *arguments)  # type: ignore[arg-type]
        logits.append(result[0][0])
        return result

    row = SamplingRow(SamplingParams(temperature=0.0), 0, IDS[:LENGTH], LENGTH)
    with patch.object(MtpBlock, "__call__", recorded):
        for start in range(0, LENGTH, chunk):
            part = IDS[start : min(start + chunk, LENGTH)]
            step = runner.submit([Chunk(pages, part, 1, start=start)])
            runner.sample(step, [row])
            end = start + len(part)
            newest = [Newest(len(part) - 1, end - 1, pages, IDS[end])] if end == LENGTH else []
            found = runner.draft(step, [IDS[start + 1 : end + 1]], newest, [row] * len(newest))
    return found[0], logits


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def drafted() -> tuple[list[int], list[Tensor]]:
    return engine_drafts(256)


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_a_chain_of_drafts(truth: Truth, drafted: tuple[list[int], list[Tensor]]) -> None:
    tokens, logits = drafted
    wanted = truth.logits(tokens[:-1])
    assert difference(logits, wanted) < TOLERANCE
    assert [int(row.argmax()) for row in wanted] == tokens


def test_drafts_do_not_depend_on_chunks(drafted: tuple[list[int], list[Tensor]]) -> None:
    for chunk in (64, 37):
        tokens, logits = engine_drafts(chunk)
        assert tokens == drafted[0]
        assert difference(logits, drafted[1]) == 0.0


@pytest.mark.parametrize(
    "variant",
    ["streams collapsed first", "e and h swapped", "YaRN", "a position too far", "hashed"],
)
def test_wrong_variants_are_far_off(
    variant: str, truth: Truth, drafted: tuple[list[int], list[Tensor]]
) -> None:
    tokens, logits = drafted
    assert difference(logits, truth.logits(tokens[:-1], variant)) > VISIBLE
