"""Drafting end to end with a chosen acceptance: random layers, a real drafter's cost, real steps.

    python benchmarks/draft_speed.py --layers 30 --batch 1 --acceptance 0.6,0.7,0.8 --record FILE

An engine without drafts answers first. Then an engine with draft blocks of the checkpoint's shape
answers the same requests under `auto`: blocks run as always, right tokens replace their drafts,
each made wrong with probability `1 - acceptance`. Answers must be equal. Random weights route every
token independently, where real neighbours share experts: `--experts 9.7` makes some experts more
popular until two rows of a step visit that many (docs/drafting.md). One line of the record per run.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsv4 import Engine, SamplingParams
from dsv4.chat.dialect import choose_dialect
from dsv4.checkpoint.names import draft_parameters
from dsv4.config import EngineConfig, ModelConfig
from dsv4.model.draft import DraftModel, draft_model
from dsv4.model.transformer import Transformer
from dsv4.request import Request
from dsv4.runner.load import LoadedModel
from dsv4.runner.settings import resolve
from dsv4.scheduler import SequenceState
from dsv4.scheduler.drafts import REST_STEPS, Drafting, Given
from dsv4.tools.bench_ops import run_facts
from dsv4.tools.speed.model import (
    decode_step,
    filled_state,
    random_model,
    random_weight,
    shape_config,
    start_at,
)
from dsv4.tools.speed.steps import experts_used

PROMPT = 96


def correlate(model: Transformer, wanted: float, seed: int = 5) -> dict[str, float]:
    """Make some experts of each layer more popular until two rows visit `wanted` of
    them. Returns the spread of the bias and what steps of 2, 4 and 6 rows visit."""
    config, device = model.config, model.embedding.device
    gates = [block.ffn.gate for block in model.blocks if block.ffn.gate.bias is not None]
    torch.manual_seed(seed)
    own = [(gate.bias.clone(), torch.randn_like(gate.bias)) for gate in gates]

    def visited(spread: float, width: int = 2) -> float:
        for gate, (bias, popular) in zip(gates, own, strict=True):
            gate.bias.copy_(bias + spread * popular)
        state = filled_state(config, 1, 512, device, width=width)
        start_at(state, 256)
        used = experts_used(lambda: decode_step(model, state.layers, state), config.num_experts)
        return used * config.num_experts

    low, high = 0.0, 2.0
    for _ in range(8):  # bisection: a larger spread visits fewer experts
        middle = (low + high) / 2
        low, high = (middle, high) if visited(middle) > wanted else (low, middle)
    return {"spread": high, **{f"experts_{w}": round(visited(high, w), 1) for w in (2, 4, 6)}}


class Replaced(Given):
    """Right tokens in place of a block's drafts, each made wrong with some probability."""

    def __init__(self, answer: list[int], acceptance: float, seed: int, vocab_size: int) -> None:
        super().__init__()
        self.answer, self.acceptance = answer, acceptance
        self.seed, self.vocab_size = seed, vocab_size

    def propose(self, tokens: Any, most: int) -> list[int]:
        count = len(super().propose(tokens, most))  # none where the block made none
        found = []
        for place in range(len(tokens), len(tokens) + count):
            right = random.Random(place * 1000 + self.seed).random() < self.acceptance
            token = self.answer[place] if place < len(self.answer) else 0
            found.append(token if right else (token + 1) % self.vocab_size)
        return found


def requests(batch: int, tokens: int, vocab_size: int) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, temperature=1.0, top_p=0.95, stop_ids=())
    rng = random.Random(3)
    return [
        Request(
            str(number),
            tuple(rng.choices(range(vocab_size), k=PROMPT)),
            replace(params, seed=number),
        )
        for number in range(batch)
    ]


def run(engine: Engine, wanted: list[Request]) -> tuple[dict[str, list[int]], float, int]:
    """Answers, milliseconds a token of one sequence while all decode, and steps."""
    answers: dict[str, list[int]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    begin, first, steps = 0.0, 0, 0
    while engine.num_unfinished:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        if begin:
            steps += 1
        elif all(answers.values()):  # the prompts are read
            begin, first = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - begin
    made = sum(map(len, answers.values())) - first
    return answers, seconds * 1e3 / (made / len(wanted)), steps


def make_engine(loaded: LoadedModel, choices: dict[str, Any], memory: int) -> Engine:
    settings = resolve(
        EngineConfig.make(**choices), loaded.model.config, has_gpu=choices["device"] != "cpu",
        memory_bytes=memory,
    )  # fmt: skip
    dialect = choose_dialect(has_system_marker=False, folder=loaded.folder)
    return Engine(replace(loaded, settings=settings), None, dialect)


def draft_blocks(model: Transformer, config: ModelConfig, device: torch.device) -> DraftModel:
    table = {
        name: random_weight(name, parameter, config, device)
        for name, parameter in draft_parameters(config).items()
    }
    return draft_model(model, table)


def with_drafter(config: ModelConfig, kind: str) -> ModelConfig:
    if kind == "mtp":
        return replace(config, num_draft_layers=1, draft_kind="mtp")
    count = config.num_layers
    shape = replace(
        config.dspark, targets=(count - 3, count - 2, count - 1), noise_id=config.vocab_size - 1
    )
    return replace(config, num_draft_layers=3, draft_kind="dspark", dspark=shape)


def forget(drafting: Drafting) -> None:
    """Forget what drafts gained in the last run; keep what steps cost."""
    drafting._rest, drafting._next_rest, drafting._waits = 0, REST_STEPS, False
    drafting._gain, drafting._num_paid, drafting._num_idle = 1.0, 0, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="flash", help="flash, pro or trial")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=384, help="of each answer")
    parser.add_argument("--acceptance", default="0.6,0.7,0.8")
    parser.add_argument("--drafter", default="mtp", choices=("mtp", "dspark"))
    parser.add_argument("--draft-tokens", default="1,3,5")
    parser.add_argument("--experts", type=float, default=0.0, help="that two rows visit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    config = with_drafter(shape_config(args.shape, args.layers), args.drafter)
    with torch.inference_mode():
        model, _ = random_model(config, device)
        block = draft_blocks(model, config, device)
        overlap = correlate(model, args.experts) if args.experts else {}
    lines: list[dict[str, Any]] = [{"run": run_facts()}]
    facts = {"shape": args.shape, "layers": config.num_layers, "batch": args.batch, **overlap}
    choices = {
        "device": args.device, "max_sequences": args.batch, "max_context": 1024,
        "chunk_tokens": 256, "kv_format": "fp8", "index_format": "fp8", "dtype": "bfloat16",
        "prefix_cache": False, "max_gap_ms": 0.0,
    }  # fmt: skip
    memory = 6 * 10**9
    folder = Path(__file__).parent
    wanted = requests(args.batch, args.tokens, config.vocab_size)
    loaded = LoadedModel(model, None, folder)  # type: ignore[arg-type]

    def tell(**result: Any) -> None:
        lines.append({"result": {**facts, **result}})
        sys.stdout.write(json.dumps(lines[-1]["result"]) + "\n")
        sys.stdout.flush()
        if args.record:
            args.record.parent.mkdir(parents=True, exist_ok=True)
            args.record.write_text("".join(json.dumps(line) + "\n" for line in lines))

    engine = make_engine(loaded, {**choices, "draft": "off"}, memory)
    run(engine, wanted)
    truth, plain, _ = run(engine, wanted)
    tell(draft="off", ms_per_token=round(plain, 4))
    engine.close()
    del engine
    different = 0
    for most in map(int, args.draft_tokens.split(",")):
        engine = make_engine(
            replace(loaded, draft=block),
            {**choices, "draft": "auto", "draft_tokens": most},
            memory,
        )
        for acceptance in map(float, args.acceptance.split(",")):
            drafting = engine._drafting
            assert drafting is not None

            def replaced(sequence: SequenceState, chance: float = acceptance) -> Replaced:
                known = [*sequence.request.prompt_ids, *truth[sequence.request.id]]
                return Replaced(known, chance, sequence.seed, config.vocab_size)

            drafting._make = replaced
            forget(drafting)
            run(engine, wanted)  # learns what steps cost
            before = engine.stats()
            forget(drafting)
            answers, ms, steps = run(engine, wanted)
            after = engine.stats()
            different += answers != truth
            tell(
                draft=args.drafter, draft_tokens=most, acceptance=acceptance,
                ms_per_token=round(ms, 4),
                speedup=round(plain / ms, 3), tokens_per_step=round(args.tokens / steps, 2),
                drafted=after.num_drafted - before.num_drafted,
                accepted=after.num_accepted - before.num_accepted, same=answers == truth,
            )  # fmt: skip
        engine.close()
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
