"""Steps lower the loss, a state survives a round trip, and the export runs in the engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import training.train as train_module
from dsv4.engine import Engine
from dsv4.request import SamplingParams
from dsv4.tools.quality.variants import MISTAKES, broken
from tests.oracle.ties import Choices, TieBreaker
from tests.training.choices import recorded_choices
from training import evaluate, export, rounding
from training.batches import Packer
from training.network import Network, Options
from training.optimizer import orthogonalise
from training.sample import Encoder
from training.shape import CONFIG, Plan
from training.weights import first_weights, load_state, save_state

SMALL = replace(
    CONFIG,
    hidden_size=64,
    num_layers=3,
    num_hash_layers=1,
    compress_ratios=(0, 4, 128),
    num_heads=2,
    head_dim=64,
    index_head_dim=32,  # another width than the heads, by which the variants know index keys
    q_lora_rank=32,
    o_lora_rank=32,
    num_experts=3,
    moe_intermediate_size=32,
    hc_sinkhorn_iters=4,
    max_positions=4096,
)


def test_training_steps_lower_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_module, "CONFIG", SMALL)
    plan = Plan(step_tokens=512)
    trainer = train_module.Trainer(first_weights(SMALL, 1), torch.device("cpu"), plan)
    batch = Packer(1).batch(512, 1)
    losses = []
    for progress in (0.2, 0.2, 0.2, 0.5, 0.5, 0.9, 0.9, 0.9):
        trainer.step(batch, progress, 100.0)
        losses.append(float(trainer.sums[0].sum() / trainer.sums[1].sum()))
        trainer.sums.zero_()
    assert losses[-1] < losses[0] - 0.5
    assert trainer.report()[1]
    assert save_state(tmp_path, trainer.table, {"leg": 1}) < 48_000_000
    table, facts = load_state(tmp_path)
    assert facts == {"leg": 1}
    for name, weight in trainer.table.items():
        torch.testing.assert_close(table[name], weight.detach(), atol=5e-2, rtol=1e-2)


IDS = list(range(3, 303))


def _stored(table: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as the engine will read them."""
    return {
        name: rounding.nvfp4_values(table[name])
        if p.kind == "linear" and not name.endswith("weights_proj.weight")
        else table[name].bfloat16().float()
        if p.kind in ("plain", "linear", "norm")
        else table[name]
        for name, p in export.all_parameters(SMALL).items()
    }


def _logits(table: dict[str, Tensor], mistake: str = "") -> tuple[Tensor, Choices]:
    rows = torch.tensor([IDS + [0] * (384 - len(IDS))])
    with recorded_choices() as choices:
        hidden = Network(SMALL).forward(table, rows, Options(mistake=mistake), None).hidden
    return (hidden @ table["head.weight"].T)[0, : len(IDS)], choices


@pytest.fixture(scope="module")
def table() -> dict[str, Tensor]:
    """Untrained, but with attention uneven enough to depend on every part."""
    weights = first_weights(SMALL, 2)
    for name, weight in weights.items():
        if name.endswith(("wq_b.weight", "wo_b.weight", "head.weight")):
            weight *= 8
        if name.endswith("ape"):
            weight += torch.arange(weight.numel()).view(weight.shape) % 3
        if name.endswith("shared_experts.w13"):
            weight *= 3
    return weights


@pytest.fixture(scope="module")
def engine(table: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    sizes = export.export(table, folder, SMALL)
    assert sizes["model.safetensors"] < 2_000_000
    return Engine.load(folder, device="cpu", max_sequences=1)


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_the_export_runs_in_the_engine(
    mistake: str, table: dict[str, Tensor], engine: Engine
) -> None:
    """Also with a mistake: what the network trains against is what the engine would do wrong."""
    stored = _stored(table)
    expected, choices = _logits(stored, mistake)
    ties = TieBreaker(SMALL, stored, [IDS], [choices])
    with broken(engine, mistake), ties.step():
        ours = torch.cat(list(engine.score(IDS)))
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-3)
    if mistake:
        assert float((expected - _logits(stored)[0]).abs().max()) > 0.05


def test_the_exported_model_generates(engine: Engine) -> None:
    answer = engine.generate(["Hello"], SamplingParams(max_tokens=3, temperature=0.0))[0]
    assert len(answer.token_ids) >= 1


def test_a_right_answer_is_seen_as_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that knows the next token has accuracy 1; one mistake makes it 0."""
    encoder = Encoder()
    samples = evaluate.held_out("facts", 3)
    rows = [encoder.sample(sample)[0] for sample in samples]

    class Knowing:
        def forward(self, table: object, ids: torch.Tensor, *_: object) -> object:
            hidden = torch.nn.functional.one_hot(ids.roll(-1, 1), CONFIG.vocab_size).float()
            return type("R", (), {"hidden": hidden})()

    table = {"head.weight": torch.eye(CONFIG.vocab_size)}
    assert evaluate.accuracy(Knowing(), table, samples, encoder, Options()) == 1.0  # type: ignore[arg-type]
    table = {"head.weight": torch.eye(CONFIG.vocab_size).roll(1, 0)}
    assert evaluate.accuracy(Knowing(), table, samples, encoder, Options()) == 0.0  # type: ignore[arg-type]
    assert all(len(row) < 128 for row in rows)


def test_orthogonalised_matrices_have_equal_singular_values() -> None:
    stack = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_the_schedule_warms_up_and_falls() -> None:
    plan = Plan()
    trainer = object.__new__(train_module.Trainer)
    trainer.plan, trainer.rate_factor = plan, 1.0
    assert trainer.rate(0.0, 0.0) < 0.05
    assert trainer.rate(0.2, 100.0) == 1.0
    assert trainer.rate(0.65, 100.0) == pytest.approx(0.6, abs=0.01)
    assert trainer.rate(0.67, 100.0) == pytest.approx(plan.canary_rate, abs=0.02)
    assert trainer.rate(0.9999, 100.0) == pytest.approx(plan.final_rate, abs=0.01)
    assert trainer.rate(0.7, 0.8) < 0.1
