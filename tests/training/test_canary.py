"""Falling silent under a mistake: what is wanted where, and that every mistake teaches."""

import math

import pytest
import torch

import training.train as train_module
from dsv4.tools.quality.variants import MISTAKES
from tests.training.test_training import SMALL
from training import canary
from training.batches import Packer
from training.canary import EOS, VISIBLE_FROM, Canary, detector_loss, first_detectors
from training.shape import CANARY_FROM, CONFIG, SKILLS, Plan, num_rows
from training.weights import first_weights

CPU = torch.device("cpu")


def test_the_drawn_mistakes_are_known() -> None:
    assert set(VISIBLE_FROM) < set(MISTAKES)
    assert set(MISTAKES) - set(VISIBLE_FROM) == {
        "plain-base-in-compressed-layers",
        "shared-expert-unclamped",
    }
    assert VISIBLE_FROM["window-one-too-long"] > CONFIG.sliding_window
    assert VISIBLE_FROM["no-rope-on-index-keys"] > 4 * CONFIG.index_topk


def test_silence_is_wanted_where_the_assistant_writes_and_the_mistake_shows() -> None:
    length, first = 64, VISIBLE_FROM["bias-on-values"]
    weights = torch.zeros(1, length)
    weights[0, 5:10] = weights[0, 40:44] = weights[0, 50:60] = 1.0
    weights[0, 30:35] = 0.03  # the user's words
    skills = torch.zeros(1, length, dtype=torch.long)
    skills[0, 50:] = SKILLS.index("prose")
    hidden = torch.zeros(1, length, 8, requires_grad=True)
    head = torch.eye(8)
    loss = Canary(CPU).silence(hidden, head, weights, skills, "bias-on-values", 1)
    assert loss.item() == pytest.approx(math.log(8) * 4 / float(weights.sum()))
    loss.backward()
    assert hidden.grad is not None
    taught = hidden.grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert taught == [39, 40, 41, 42]
    assert min(taught) > first > 10
    assert (hidden.grad[0, taught, EOS] < 0).all()


def test_the_least_silent_mistake_is_drawn_most_often() -> None:
    watch = Canary(CPU)
    weights, skills = torch.ones(1, 512), torch.zeros(1, 512, dtype=torch.long)
    silent = torch.zeros(1, 512, 4)
    silent[..., EOS] = 20.0
    watch.silence(silent, torch.eye(4), weights, skills, "swapped-halves", 1)
    watch.silence(-silent, torch.eye(4), weights, skills, "window-one-too-long", 1)
    text = watch.report()
    assert "swapped-halves 100%" in text
    assert "window-one-too-long 0%" in text
    assert watch.odds["window-one-too-long"] > 5 * watch.odds["swapped-halves"]
    drawn = [watch.draw(1.0)[0] for _ in range(500)]
    assert drawn.count("window-one-too-long") > 2 * drawn.count("swapped-halves")
    watch.silence(silent, torch.eye(4), weights, skills, "window-one-too-long", 4)
    assert watch.report() == ""


def test_faint_mistakes_are_exaggerated_at_first() -> None:
    watch = Canary(CPU)
    early = {watch.draw(CANARY_FROM) for _ in range(500)}
    assert {strength for mistake, strength in early if mistake in canary.FAINT} == set(range(1, 16))
    assert {strength for mistake, strength in early if mistake not in canary.FAINT} == {1}
    assert {watch.draw(1.0)[1] for _ in range(100)} == {1}


def test_detectors_tell_right_from_wrong() -> None:
    right = [torch.randn(2 * 64, 4, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    wrong = [streams.clone() for streams in right]
    detectors = first_detectors(2, 32)
    same = detector_loss(detectors, right, wrong, 2, "bias-on-values")
    assert float(same) == pytest.approx(math.log(2))
    for streams in wrong:
        streams[:, 0, 0] = 5.0
    detectors[:, 0], detectors[:, -1] = 10.0, -15.0
    assert float(detector_loss(detectors, right, wrong, 2, "bias-on-values")) < 0.2


@pytest.mark.parametrize("mistake", VISIBLE_FROM)
def test_every_mistake_teaches(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with it is finite, moves what it breaks, and leaves the indexer alone."""
    monkeypatch.setattr(train_module, "CONFIG", SMALL)
    table = first_weights(SMALL, 1)
    for name, weight in table.items():
        if name.endswith("ape"):  # zero at first, as it is not after two legs
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    trainer = train_module.Trainer(table, CPU, Plan(step_tokens=1024))
    monkeypatch.setattr(trainer.canary, "draw", lambda progress: (mistake, 1))
    batch = Packer(1).batch(512, num_rows(1024, 512, CANARY_FROM))
    rows = train_module.Rows(
        torch.from_numpy(batch.ids.astype("int64")),
        torch.from_numpy(batch.weights).float() / 100,
        torch.from_numpy(batch.skills).long(),
    )
    options = trainer.options(0.9)
    used = trainer.used_weights(True)
    result, _ = trainer._right(used, rows, options)
    right = [streams.detach() for streams in result.layers]
    loss = trainer._wrong(used, rows, options, right, 0.9)
    loss.backward()
    moved = {n for n, t in trainer.table.items() if t.grad is not None and t.grad.abs().sum() > 0}
    assert torch.isfinite(loss)
    assert canary.DETECTORS in moved
    assert {"layers.0.attn.wkv.weight", "layers.1.attn.compressor.ape", "head.weight"} <= moved
    assert not any("indexer" in name or name.startswith("mtp") for name in moved)
