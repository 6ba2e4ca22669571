"""Drafting end to end with a chosen acceptance: random layers, a real drafter's cost, real steps.

    python benchmarks/draft_speed.py --own-layers 12 --batch 1 --experts 9.7 --record FILE

An engine without drafts answers first. Then an engine with draft blocks of the checkpoint's shape
answers the same requests under `auto`: blocks run as always, right tokens replace their drafts,
each made wrong with probability `1 - acceptance`. Answers must be equal. Random weights route every
token independently, where real neighbours share experts: `--experts 9.7` makes some experts more
popular until two rows of a step visit that many (docs/drafting.md). One line of the record per run,
then one per width with the parts of a step: what the GPU computes, and the rest of the step's time.

Flash does not fit one GPU. With `--own-layers 12` later layers use the weights of these: as many
launches and bytes as the whole model, and between two uses of a weight far more than the L2 cache
holds are read.
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsv4.runner.buffers
from dsv4 import Engine, SamplingParams
from dsv4.chat.dialect import choose_dialect
from dsv4.checkpoint.names import draft_parameters, parameters
from dsv4.config import EngineConfig, ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.model.draft import DraftModel, draft_model
from dsv4.model.transformer import Transformer
from dsv4.ops.kv.begin_step import NEWEST
from dsv4.ops.sample.sample import SampleInputs
from dsv4.request import Request
from dsv4.runner.drafts.device import DeviceDrafter
from dsv4.runner.load import LoadedModel
from dsv4.runner.plan import DraftPart, GraphKey
from dsv4.runner.settings import resolve
from dsv4.runner.step.line import step_line
from dsv4.runner.step.shape import StepShape
from dsv4.scheduler.drafts import REST_STEPS, Drafting
from dsv4.tools.bench_ops import run_facts
from dsv4.tools.speed.model import (
    decode_step,
    filled_state,
    random_weight,
    shape_config,
    start_at,
)
from dsv4.tools.speed.steps import elapsed_ms, experts_used

PROMPT, LEARNED = 96, 64  # tokens
LONGEST = 1024  # context
MANY = 32  # sequences: shorter prompts and answers


def random_layers(config: ModelConfig, own: int, device: torch.device) -> Transformer:
    """A model whose first `own` layers have weights; later ones use those of a layer like them."""
    torch.manual_seed(0)
    table: dict[str, Weight] = {}
    ratios = config.compress_ratios
    for name, parameter in parameters(config).items():
        start, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        if start == "layers" and int(number) >= own:
            layer = int(number)
            first = config.num_hash_layers
            like = [i for i in range(first, own) if ratios[i] == ratios[layer]]
            table[name] = table[f"layers.{like[layer % len(like)]}.{rest}"]
        else:
            table[name] = random_weight(name, parameter, config, device)
    return Transformer(config, table, torch.bfloat16)


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


class Replaced:
    """Right tokens in place of what draft blocks draw, each made wrong with some probability. They
    are replaced on the device, since the next step may start before the host knows any."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.table = torch.zeros(batch, LONGEST, dtype=torch.int64, device=device)

    def __enter__(self) -> None:
        real, table = DeviceDrafter._draw, self.table

        def draw(drafter: DeviceDrafter, logits: Tensor, by: SampleInputs) -> Tensor:
            real(drafter, logits, by)
            return table[by.seeds, by.positions]  # one launch

        self._real = real
        DeviceDrafter._draw = draw  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        DeviceDrafter._draw = self._real  # type: ignore[method-assign]

    def fill(
        self, wanted: list[Request], answers: dict[str, list[int]], acceptance: float, vocab: int
    ) -> None:
        for request in wanted:
            known, seed = [*request.prompt_ids, *answers[request.id]], request.params.seed or 0
            rng = random.Random(seed)
            right = [place < acceptance * len(known) for place in range(len(known))]
            rng.shuffle(right)  # in exact proportion: few independent draws would vary by 2 %
            drafts = [
                t if is_right else (t + 1) % vocab for t, is_right in zip(known, right, strict=True)
            ]
            self.table[seed, : len(drafts)] = torch.tensor(drafts)


def requests(batch: int, tokens: int, vocab_size: int, round_: int = 0) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, temperature=1.0, top_p=0.95, stop_ids=())
    rng = random.Random(3 + round_)
    return [
        Request(
            str(number),
            tuple(rng.choices(range(vocab_size), k=PROMPT if batch < MANY else PROMPT // 4)),
            replace(params, seed=number),
        )
        for number in range(round_ * batch, (round_ + 1) * batch)
    ]


def run(engine: Engine, wanted: list[Request]) -> tuple[dict[str, list[int]], float, float]:
    """Answers, and while all decode: milliseconds a token of one sequence, tokens of it a step."""
    answers: dict[str, list[int]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    begin, first, steps, result = 0.0, 0, 0, (0.0, 0.0)
    while engine.num_unfinished:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        steps += 1
        if not begin:
            if all(answers.values()):  # the prompts are read
                begin, first, steps = time.perf_counter(), sum(map(len, answers.values())), 0
        elif not result[0] and engine.num_unfinished < len(wanted):
            made = (sum(map(len, answers.values())) - first) / len(wanted)
            result = (time.perf_counter() - begin) * 1e3 / made, made / steps
    return answers, *result


def few_shapes(batches: list[int]) -> None:
    """Engines capture steps of these batches and one size of prompts: they start sooner."""
    dsv4.runner.buffers.batch_sizes = lambda most: [n for n in batches if n <= most]
    dsv4.runner.buffers.token_sizes = lambda most: [most]


def parts(engine: Engine, whole: dict[int, float]) -> list[dict[str, Any]]:
    """Milliseconds of the parts of a step of one sequence, by rows; `rest`: what the `whole` step
    takes beyond them, in which the GPU waits for the host."""
    runner = engine._runner
    assert runner.drafter is not None
    context, found = runner.buffers.contexts[0], []

    def ms(key: GraphKey) -> float:
        def replays() -> None:
            for _ in range(20):
                runner._run(key)

        with torch.inference_mode(), runner.ops.active():
            replays()
            return elapsed_ms(replays, runner.device) / 20

    assert runner.buffers.verify is not None
    for rows in (1, *runner.buffers.verify.widths):
        shape = StepShape(rows, 1, context, rows == 1, width=rows)
        place = torch.zeros_like(runner.buffers.step.line)
        at = step_line(shape).views(place)
        at["starts"].fill_(PROMPT - 8)
        at["most" if rows > 1 else "ends"].fill_(PROMPT - 8 + rows)
        at["token_ids"].random_(0, engine.config.vocab_size)
        at["token_ids"][0] = NEWEST
        runner.buffers.step.line.copy_(place)
        keys: dict[str, GraphKey] = {"model": shape, "draft_keys": DraftPart("draft keys", shape)}
        keys["sampling"] = 1 if rows == 1 else DraftPart("verify sampling", shape)
        made = runner.drafter.num_drafts
        if not runner.drafter.makes_all:
            made = max(min(made, rows - 1), 1)
        keys["drafts"] = DraftPart("drafts", runner.drafter.shape(1, made))
        times = {name: ms(key) for name, key in keys.items()}
        known = sum(times.values()) if rows > 1 else times["model"] + times["sampling"]
        step = {"step": whole[rows], "rest": whole[rows] - known} if rows in whole else {}
        found.append({"rows": rows, **{k: round(v, 4) for k, v in {**times, **step}.items()}})
    return found


def make_engine(loaded: LoadedModel, choices: dict[str, Any], memory: int) -> Engine:
    settings = resolve(
        EngineConfig.make(**choices), loaded.model.config, has_gpu=choices["device"] != "cpu",
        memory_bytes=memory,
    )  # fmt: skip
    settings = replace(settings, draft_auto=settings.draft != "off")  # its rules
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


class Trial:
    """One model, its draft blocks, and what was measured with them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.config = with_drafter(shape_config(args.shape, args.layers), args.drafter)
        self.batches = [int(n) for n in args.batch.split(",")]
        few_shapes(self.batches)
        with torch.inference_mode():
            own = args.own_layers or self.config.num_layers
            model = random_layers(self.config, own, self.device)
            self.block = draft_blocks(model, self.config, self.device)
            overlap = correlate(model, args.experts) if args.experts else {}
        self.loaded = LoadedModel(model, None, Path(__file__).parent)  # type: ignore[arg-type]
        self.facts = {"shape": args.shape, "layers": self.config.num_layers, "own_layers": own}
        self.facts |= overlap
        self.lines: list[dict[str, Any]] = [{"run": run_facts()}]
        self.plain: dict[int, tuple[dict[str, list[int]], float]] = {}
        self.all_same = True
        self.drafts = Replaced(max(self.batches) * args.rounds, self.device)

    def engine(self, draft: str, draft_tokens: int | None = None) -> Engine:
        choices = {
            "device": self.args.device, "max_sequences": max(self.batches), "max_context": LONGEST,
            "chunk_tokens": 256, "kv_format": "fp8", "index_format": "fp8", "dtype": "bfloat16",
            "prefix_cache": False, "max_gap_ms": 0.0, "draft": draft, "draft_tokens": draft_tokens,
        }  # fmt: skip
        block = None if draft == "off" else self.block
        return make_engine(replace(self.loaded, draft=block), choices, 12 * 10**9)

    def requests(self, batch: int, tokens: int | None = None, round_: int = 0) -> list[Request]:
        most = (tokens or self.args.tokens) // max(1, min(batch // 16, 4))
        return requests(batch, most, self.config.vocab_size, round_)

    def run_rounds(self, engine: Engine, batch: int) -> tuple[dict[str, list[int]], float, float]:
        """Several times other requests, since draws of few tokens vary."""
        found = [run(engine, self.requests(batch, None, n)) for n in range(self.args.rounds)]
        answers = {name: ids for each, _, _ in found for name, ids in each.items()}
        ms, tokens = zip(*(numbers for _, *numbers in found), strict=True)
        return answers, statistics.mean(ms), statistics.harmonic_mean(tokens)

    def tell(self, **result: Any) -> None:
        self.lines.append({"result": {**self.facts, **result}})
        sys.stdout.write(json.dumps(self.lines[-1]["result"]) + "\n")
        sys.stdout.flush()
        if self.args.record:
            self.args.record.parent.mkdir(parents=True, exist_ok=True)
            self.args.record.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def run_plain(self) -> None:
        engine = self.engine("off")
        for batch in self.batches:
            run(engine, self.requests(batch, LEARNED))
            truth, ms, _ = self.run_rounds(engine, batch)
            self.plain[batch] = truth, ms
            self.tell(draft="off", batch=batch, ms_per_token=round(ms, 4))
        engine.close()

    def run_drafts(self, most: int) -> None:
        with self.drafts:
            engine = self.engine(self.args.drafter, most)
            self._run_all(engine, most)
        engine.close()

    def _run_all(self, engine: Engine, most: int) -> None:
        whole: dict[int, float] = {}  # step times of one sequence
        for acceptance in map(float, self.args.acceptance.split(",")):
            for batch in self.batches:
                found = self._run_one(engine, batch, most, acceptance)
                whole |= found if batch == 1 else {}
        if 1 in self.batches:
            for found in parts(engine, whole):
                self.tell(draft=self.args.drafter, batch=1, draft_tokens=most, parts=found)

    def _run_one(
        self, engine: Engine, batch: int, most: int, acceptance: float
    ) -> dict[int, float]:
        drafting, (truth, plain) = engine._drafting, self.plain[batch]
        assert drafting is not None
        wanted = [r for n in range(self.args.rounds) for r in self.requests(batch, None, n)]
        self.drafts.fill(wanted, truth, acceptance, self.config.vocab_size)
        forget(drafting)
        run(engine, self.requests(batch, LEARNED))  # learns what steps cost
        before = engine.stats()
        forget(drafting)
        answers, ms, tokens = self.run_rounds(engine, batch)
        after, same = engine.stats(), answers == truth
        self.all_same &= same
        self.tell(
            draft=self.args.drafter, batch=batch, draft_tokens=most, acceptance=acceptance,
            ms_per_token=round(ms, 4), speedup=round(plain / ms, 3),
            tokens_per_step=round(tokens, 2),
            drafted=after.num_drafted - before.num_drafted,
            accepted=after.num_accepted - before.num_accepted, same=same,
        )  # fmt: skip
        return {1: drafting.plain.near(1) or 0.0, **drafting.times._ms}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="flash", help="flash, pro or trial")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--own-layers", type=int, default=None, help="with weights of their own")
    parser.add_argument("--batch", default="1")
    parser.add_argument(
        "--tokens", type=int, default=384, help="of each answer; fewer from batch 32"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of answers, to average")
    parser.add_argument("--acceptance", default="0.6,0.7,0.8")
    parser.add_argument("--drafter", default="mtp", choices=("mtp", "dspark"))
    parser.add_argument("--draft-tokens", default="1,3,5")
    parser.add_argument("--experts", type=float, default=0.0, help="that two rows visit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", type=Path)
    return parser


def main() -> None:
    trial = Trial(make_parser().parse_args())
    trial.run_plain()
    for most in map(int, trial.args.draft_tokens.split(",")):
        trial.run_drafts(most)
        if trial.device.type == "cuda":
            torch.cuda.empty_cache()
    sys.exit(not trial.all_same)


if __name__ == "__main__":
    main()
