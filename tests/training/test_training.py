"""Steps lower the loss, a state survives a round trip, and the export runs in the engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import training.train as train_module
from dsv4.engine import Engine
from dsv4.request import SamplingParams
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


def test_the_export_runs_in_the_engine(tmp_path: Path) -> None:
    table = first_weights(SMALL, 2)
    sizes = export.export(table, tmp_path, SMALL)
    assert sizes["model.safetensors"] < 2_000_000
    engine = Engine.load(tmp_path, device="cpu", max_sequences=1)
    ids = list(range(3, 203))
    ours = torch.cat(list(engine.score(ids)))
    stored = {
        name: rounding.nvfp4_values(weight)
        if p.kind == "linear" and not name.endswith("weights_proj.weight")
        else weight.bfloat16().float()
        if p.kind in ("plain", "linear", "norm")
        else weight
        for (name, p), weight in zip(
            export.all_parameters(SMALL).items(), table.values(), strict=True
        )
    }
    rows = torch.tensor([ids + [0] * 56])
    hidden = Network(SMALL).forward(stored, rows, Options(), torch.ones(1, 256)).hidden
    expected = (hidden @ stored["head.weight"].T)[0, :200]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
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
    assert trainer.rate(0.7, 100.0) == pytest.approx(0.52, abs=0.05)
    assert trainer.rate(0.9999, 100.0) == pytest.approx(plan.final_rate, abs=0.01)
    assert trainer.rate(0.7, 0.8) < 0.1
