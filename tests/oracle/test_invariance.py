"""Promise 2: a sequence's numbers do not depend on its company or on how it is cut.

More than 200 random schedules: sequences join, pause and advance in chunks of any size, alone
and together. Every logit of every token must have the same bits as in a plain run alone.
"""

import random

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.transformer import Transformer
from dsv4.request import Request
from dsv4.runner.runner import Runner
from dsv4.runner.settings import resolve
from dsv4.testing import random_weights, small_config
from tests.oracle.harness import random_schedule, run_schedule

CONFIG = small_config(num_layers=4, compress_ratios=(128, 4, 0, 4), num_hash_layers=1)
LENGTHS = (140, 60, 33, 20, 5, 1)
SCHEDULES_PER_SHARD = 26

# (shard, nasty weights, activations, key format, index format)
SHARDS = (
    (0, False, "float32", "fp32", "fp32"),
    (1, False, "float32", "fp32", "fp32"),
    (2, True, "float32", "fp32", "fp32"),
    (3, True, "float32", "bf16", "bf16"),
    (4, False, "bfloat16", "fp8", "fp8"),
    (5, False, "bfloat16", "fp8", "fp4"),
    (6, True, "bfloat16", "fp8", "fp8"),
    (7, False, "float32", "fp8", "fp4"),
)


def make_runner(config: ModelConfig, nasty: bool, dtype: str, kv: str, index: str) -> Runner:
    choices = EngineConfig(
        device="cpu",
        dtype=dtype,
        kv_format=kv,
        index_format=index,
        max_sequences=4,
        max_context=256,
        chunk_tokens=256,
    )
    settings = resolve(choices, config, has_gpu=False, memory_bytes=2**32)
    weights = random_weights(config, 99, nasty=nasty)
    return Runner(Transformer(config, weights, getattr(torch, dtype)), settings)


@pytest.mark.parametrize(("shard", "nasty", "dtype", "kv", "index"), SHARDS)
def test_any_schedule_gives_the_same_bits(
    shard: int, nasty: bool, dtype: str, kv: str, index: str
) -> None:
    rng = random.Random(shard)
    runner = make_runner(CONFIG, nasty, dtype, kv, index)
    sequences = [[rng.randrange(CONFIG.vocab_size) for _ in range(n)] for n in LENGTHS]
    alone = [run_schedule(runner, [ids], [[(0, len(ids))]])[0] for ids in sequences]
    assert all(torch.isfinite(logits).all() for logits in alone)
    for _ in range(SCHEDULES_PER_SHARD):
        chosen = rng.sample(range(len(sequences)), rng.randint(1, 4))
        schedule = random_schedule(rng, [LENGTHS[number] for number in chosen])
        results = run_schedule(runner, [sequences[number] for number in chosen], schedule)
        for number, logits in zip(chosen, results, strict=True):
            assert torch.equal(logits, alone[number]), f"sequence {number} under {schedule}"


@pytest.mark.parametrize("chunk_tokens", [7, 32, 256])
def test_engine_answers_do_not_depend_on_company(chunk_tokens: int) -> None:
    """Tokens and log-probabilities, through the whole engine, with arrivals at random times."""
    rng = random.Random(chunk_tokens)
    engine = Engine.load("tiny", device="cpu", max_sequences=3, chunk_tokens=chunk_tokens)
    requests = [
        Request(
            f"r{number}",
            tuple(rng.randrange(256) for _ in range(rng.choice((1, 9, 40, 130)))),
            SamplingParams(
                max_tokens=rng.randint(1, 12),
                temperature=rng.choice((0.0, 1.0)),
                top_p=0.95,
                seed=number,
                presence_penalty=rng.choice((0.0, 0.5)),
                logprobs=2,
                stop_ids=(),
            ),
        )
        for number in range(6)
    ]
    plain = Engine.load("tiny", device="cpu", max_sequences=1)
    alone = {r.id: plain.generate([list(r.prompt_ids)], r.params)[0] for r in requests}
    waiting, outputs = list(requests), {r.id: [] for r in requests}
    while waiting or engine.num_unfinished:
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        for output in engine.step():
            outputs[output.request_id].append(output)
    for request in requests:
        got = outputs[request.id]
        assert [t for o in got for t in o.token_ids] == list(alone[request.id].token_ids)
        assert [p for o in got for p in o.logprobs] == list(alone[request.id].logprobs)
    engine.check_integrity()
