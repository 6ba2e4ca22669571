"""Drafts of the embedded model and of random layers on a GPU: answers of `draft=off`, bit for bit.

Of random layers also on a CPU, in a small shape.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4.runner.buffers
from dsv4 import Engine, SamplingParams
from dsv4.chat.dialect import choose_dialect
from dsv4.checkpoint.names import Parameter, draft_parameters, parameters
from dsv4.config import EngineConfig
from dsv4.formats.quantized import Weight
from dsv4.model.draft import draft_model
from dsv4.model.transformer import Transformer
from dsv4.ops.sample.sample import SampleInputs
from dsv4.request import Request, join_outputs
from dsv4.runner.drafts.device import DeviceDrafter
from dsv4.runner.load import LoadedModel
from dsv4.runner.settings import resolve
from dsv4.testing import _random_tensor
from dsv4.tools.speed.model import random_weight, shape_config
from tests.models import verify_everything

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXT = "The quick brown fox counts: one two three four five six seven. "
PROMPTS = ["What is 17 + 25?", "What is the capital of France?", TEXT, TEXT * 9, "A", TEXT * 30]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "seed": 3, "logprobs": 5},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "seed": 1,
     "logprobs": 1},
    {"logit_bias": {7: 4.0, 11: -100.0}, "seed": 2, "logprobs": 2},
]  # fmt: skip


def answers(folder: str | Path, draft: str, everything: bool) -> tuple[list[Any], int]:
    """(tokens, log-probabilities and text of every answer, drafts that were verified)."""
    engine = Engine.load(folder, device="cuda", draft=draft, max_context=2048, max_sequences=8)
    if everything and engine._drafting is not None:
        verify_everything(engine._drafting)  # not only while that is measured to be faster
    found = []
    for options in OPTIONS:
        params = SamplingParams(max_tokens=60, stop_ids=(), **options)
        found += engine.generate(PROMPTS[:1], params)
        found += engine.generate(PROMPTS, params)
    verified = engine.stats().num_verified
    engine.close()
    return [(one.token_ids, one.logprobs, one.text) for one in found], verified


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers("tiny", "off", everything=False)[0]


@pytest.mark.parametrize(
    "draft", [pytest.param(d, marks=ON_A_GPU) for d in ("lookup", "mtp", "dspark", "auto")]
)
def test_drafts_change_nothing(draft: str, plain: list[Any], tmp_path: Path) -> None:
    from training.dspark import assemble

    folder = assemble(tmp_path) if draft == "dspark" else "tiny"
    found, verified = answers(folder, draft, everything=draft != "auto")
    assert found == plain
    assert verified > 10


# --- random layers ------------------------------------------------------------------------------

LONGEST = 1024  # context
ANSWER = {"cpu": 12, "cuda": 40}  # tokens
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.95, "logprobs": 0},  # steps run ahead of the host
    {"temperature": 0.8, "frequency_penalty": 0.4, "logprobs": 2},  # the host draws row by row
]


def layers_of(shape: str, kind: str, device: torch.device) -> LoadedModel:
    """A few random layers, one of each kind at least, with random draft blocks."""
    config = shape_config(shape, 4)
    spark = replace(config.dspark, targets=(1, 2, 3), noise_id=config.vocab_size - 1)
    config = replace(
        config, num_draft_layers={"mtp": 1, "dspark": 3}[kind], draft_kind=kind, dspark=spark
    )  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, parameter: Parameter) -> Weight:
        if device.type == "cpu":  # which unpacks its weights once
            return _random_tensor(name, parameter, config, generator)
        return random_weight(name, parameter, config, device)

    with torch.inference_mode():
        torch.manual_seed(0)
        own, drafts = (
            {name: drawn(name, parameter) for name, parameter in some(config).items()}
            for some in (parameters, draft_parameters)
        )
        model = Transformer(config, own, torch.bfloat16)
        draft = draft_model(model, drafts)
    return LoadedModel(model, None, Path(__file__).parent, draft=draft)  # type: ignore[arg-type]


def engine_of(loaded: LoadedModel, device: str, draft: str, num_drafts: int) -> Engine:
    choices = EngineConfig(
        device=device, max_sequences=8, max_context=LONGEST, chunk_tokens=LONGEST, kv_format="fp8",
        index_format="fp8", dtype="bfloat16", prefix_cache=False, max_gap_ms=0.0, draft=draft,
        draft_tokens=num_drafts or None,
    )  # fmt: skip
    settings = resolve(
        choices, loaded.model.config, has_gpu=device != "cpu", memory_bytes=12 * 10**9
    )
    block = None if draft == "off" else loaded.draft
    dialect = choose_dialect(has_system_marker=False, folder=loaded.folder)
    engine = Engine(replace(loaded, settings=settings, draft=block), None, dialect)
    if engine._drafting is not None:
        engine._drafting.judges = False
    return engine


def requests(batch: int, option: int, vocab_size: int, tokens: int) -> list[Request]:
    rng = random.Random(batch)
    found = []
    for seed in range(batch):
        prompt = rng.choices(range(vocab_size), k=90 + 4 * seed)  # some answers cross 128
        params = SamplingParams(max_tokens=tokens, seed=seed, stop_ids=(), **DRAWN[option])
        found.append(Request(f"{batch} {option} {seed}", tuple(prompt), params))
    return found


def answers_of(engine: Engine, wanted: list[Request]) -> dict[str, tuple[Any, Any]]:
    outputs: dict[str, list[Any]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    while engine.num_unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    whole = {request.id: join_outputs(request, outputs[request.id]) for request in wanted}
    return {name: (one.token_ids, one.logprobs) for name, one in whole.items()}


class Scripted:
    """Draft blocks run as always; then known tokens take the place of what they drew, each made
    wrong with some chance. On the device, since steps run ahead of the host."""

    def __init__(self, patch: pytest.MonkeyPatch, device: torch.device) -> None:
        table = self.table = torch.zeros(8 * LONGEST, dtype=torch.int64, device=device)
        real = DeviceDrafter._draw

        def draw(drafter: DeviceDrafter, logits: Tensor, by: SampleInputs) -> Tensor:
            real(drafter, logits, by)
            return table.index_select(0, by.positions.add(by.seeds, alpha=LONGEST))

        patch.setattr(DeviceDrafter, "_draw", draw)

    def fill(self, wanted: list[Request], right: dict[str, Any], chance: float, size: int) -> None:
        for request in wanted:
            rng, seed = random.Random(request.id), request.params.seed or 0
            known = [*request.prompt_ids, *right[request.id][0]]
            drafts = [token if rng.random() < chance else (token + 1) % size for token in known]
            self.table[seed * LONGEST :][: len(drafts)] = torch.tensor(drafts)


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
@pytest.mark.parametrize(
    ("shape", "device", "widths"),
    [("trial", "cpu", (6,)), pytest.param("flash", "cuda", (2, 4, 6), marks=ON_A_GPU)],
)
def test_drafts_change_nothing_in_random_layers(
    kind: str, shape: str, device: str, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 to 48 verify rows, drafts right at several rates: tokens and log-probabilities of
    `draft=off`."""
    used = [(batch, option) for batch in (1, 2, 3, 5, 8) for option in range(len(DRAWN))]
    if device == "cpu":
        used = [(8, 1), (1, 2)]
    monkeypatch.setattr(dsv4.runner.buffers, "batch_sizes", lambda most: [1, 2, 4, 8])
    monkeypatch.setattr(dsv4.runner.buffers, "token_sizes", lambda most: [most])
    loaded = layers_of(shape, kind, torch.device(device))
    size = loaded.model.config.vocab_size
    cases = [requests(batch, option, size, ANSWER[device]) for batch, option in used]
    plain, right = engine_of(loaded, device, "off", 0), dict[str, tuple[Any, Any]]()
    for wanted in cases:
        right |= answers_of(plain, wanted)
    plain.close()
    scripted, rows = Scripted(monkeypatch, torch.device(device)), set[int]()
    for width in widths:
        engine = engine_of(loaded, device, kind, width - 1)
        assert engine._drafting is not None
        real = engine._drafting.time_step

        def timed(sequences: Any, count: int, *others: Any, real: Any = real, **how: Any) -> None:
            rows.add(count)
            real(sequences, count, *others, **how)

        monkeypatch.setattr(engine._drafting, "time_step", timed)
        for number, wanted in enumerate(cases):
            scripted.fill(wanted, right, (0.7, 1.0, 0.6, 0.0)[number % 4], size)
            found = answers_of(engine, wanted)
            assert found == {request.id: right[request.id] for request in wanted}
        stats = engine.stats()
        assert stats.num_drafted > stats.num_accepted > ANSWER[device]
        engine.close()
    assert {*widths, 8 * max(widths)} <= rows
