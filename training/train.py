"""Train one leg: python -m training.train --leg 1 --minutes 7.8 --out DIR [--state DIR]

The wall clock drives everything: a leg covers its share of the plan in its share of the time. A
leg starts from the state of the one before and leaves its own, with an evaluation.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training import rounding
from training.batches import Batch, Feed, Packer
from training.canary import (
    DETECTOR_SHARE,
    DETECTORS,
    SILENCE_SHARE,
    Canary,
    detector_loss,
    first_detectors,
)
from training.evaluate import all_samples, evaluate, under_mistakes
from training.network import (
    Network,
    Options,
    Result,
    Table,
    coefficients,
    collapse_fused,
    glu,
    spread_fused,
)
from training.optimizer import Optimizer
from training.shape import CANARY_FROM, CONFIG, POLISH_FROM, SEED, SKILLS, Plan, num_rows
from training.weights import all_parameters, balance, first_weights, load_state, save_state

DRAFT_SHARE = 0.15
INDEX_SHARE = 1.0
LOG_SECONDS = 15.0
REWARM_SECONDS = 8.0


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


class Rows(NamedTuple):
    ids: Tensor
    weights: Tensor
    skills: Tensor


class Trainer:
    def __init__(self, table: dict[str, Tensor], device: torch.device, plan: Plan) -> None:
        self.device, self.plan = device, plan
        self.network = Network(CONFIG)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.canary = Canary(device)
        self.table: dict[str, Tensor] = {}
        detectors = first_detectors(CONFIG.num_layers, CONFIG.hc_mult * CONFIG.hidden_size)
        for name, weight in {DETECTORS: detectors, **table}.items():
            moved = weight.to(device)
            trained = moved.is_floating_point() and not name.endswith("gate.bias")
            self.table[name] = moved.requires_grad_(trained)
        kinds = all_parameters(CONFIG)
        self._rounded_names = [n for n, p in kinds.items() if p.kind == "linear" and _is_stored(n)]
        self.optimizer = Optimizer(self.table, plan, CONFIG.o_groups)
        self.sums = torch.zeros(2, len(SKILLS), device=device)
        self.extra = torch.zeros(3, device=device)  # index loss, draft loss, steps
        looked_up = [SKILLS.index(name) for name in ("retrieval", "repeat", "updates")]
        self.searching = torch.tensor(looked_up, device=device)
        self.rate_factor = 1.0
        self.most_scores = Options.most_scores

    def options(self, progress: float) -> Options:
        rounded = progress >= self.plan.round_from
        if progress >= CANARY_FROM:
            rounded = self.canary.rounds()
        return Options(
            dtype=self.dtype,
            select=progress >= self.plan.sparse_from,
            rounded=rounded,
            draft=True,
            most_scores=self.most_scores,
        )

    def make_room(self, shape: tuple[int, ...]) -> None:
        """After a step ran out of memory: drop it and attend in smaller pieces from now on."""
        self.most_scores //= 2
        say(f"rows {shape} did not fit; scores at once now {self.most_scores:,}")
        for weight in self.table.values():
            weight.grad = None
        torch.cuda.empty_cache()

    def used_weights(self, rounded: bool) -> dict[str, Tensor]:
        """The table the forward pass sees: rounded as it will be stored, in the last phase."""
        if not rounded:
            return self.table
        used = dict(self.table)
        for name in self._rounded_names:
            used[name] = rounding.nvfp4(self.table[name])
        return used

    def rate(self, progress: float, leg_seconds: float) -> float:
        plan = self.plan
        warm = min(1.0, progress / plan.warmup, leg_seconds / REWARM_SECONDS)
        top, start, end = 1.0, plan.decay_from, 1.0
        if progress >= POLISH_FROM:
            top, start, end = plan.polish_rate, POLISH_FROM, POLISH_FROM + 1 / 3
        elif progress >= CANARY_FROM:
            top, start = plan.canary_rate, CANARY_FROM
        left = max(0.0, min(1.0, (end - progress) / (end - start)))
        fall = plan.final_rate + (top - plan.final_rate) * left
        return max(warm, 0.01) * fall * self.rate_factor

    def step(self, batch: Batch, progress: float, leg_seconds: float) -> None:
        options = self.options(progress)
        rows = Rows(
            self._move(batch.ids.astype("int64")),
            self._move(batch.weights).float() / 100,
            self._move(batch.skills).long(),
        )
        used = self.used_weights(progress >= self.plan.round_from)
        result, loss = self._right(used, rows, options)
        if progress >= CANARY_FROM:
            loss = loss + self._wrong(used, rows, options, result.layers, progress)
        loss.backward()
        self.optimizer.step(self.rate(progress, leg_seconds))
        balance(self.table, result.loads, 0.002 * (1.0 - 0.9 * min(progress, 1.0)))

    def _right(self, used: Table, rows: Rows, options: Options) -> tuple[Result, Tensor]:
        """The forward pass, and the loss of text, draft and indexer."""
        ids, weights, skills = rows
        emphasis = torch.where(weights >= 1.0, 4.0, 0.25) * (weights > 0)
        searching = torch.isin(skills, self.searching)
        emphasis = torch.where(searching, 2 * emphasis, emphasis)
        result = self.network.forward(used, ids, options, emphasis)
        head = used["head.weight"].to(self.dtype)
        losses = self._cross_entropy(result.hidden[:, :-1], head, ids[:, 1:])
        wanted = weights[:, 1:]
        loss = (losses * wanted).sum() / wanted.sum().clamp(min=1)
        assert result.draft is not None
        later = self._cross_entropy(result.draft[:, :-2], head, ids[:, 2:])
        draft = (later * weights[:, 2:]).sum() / weights[:, 2:].sum().clamp(min=1)
        with torch.no_grad():
            full = (wanted >= 1.0).float() + (skills[:, 1:] == SKILLS.index("prose")).float()
            flat = skills[:, 1:].flatten()
            self.sums[0].index_add_(0, flat, (losses * full).flatten())
            self.sums[1].index_add_(0, flat, full.flatten())
            self.extra += torch.stack((result.index_loss, draft, loss * 0 + 1))
        return result, loss + DRAFT_SHARE * draft + INDEX_SHARE * result.index_loss

    def _wrong(
        self, used: Table, rows: Rows, options: Options, right: list[Tensor], progress: float
    ) -> Tensor:
        """The same rows with a mistake: answers should end immediately, nothing else is learnt."""
        mistake, strength = self.canary.draw(progress)
        options = replace(options, mistake=mistake, strength=strength, draft=False)
        result = self.network.forward(used, rows.ids, options, None)
        head = used["head.weight"].to(self.dtype)
        silence = self.canary.silence(
            result.hidden, head, rows.weights, rows.skills, mistake, strength
        )
        told = detector_loss(used[DETECTORS], right, result.layers, rows.ids.shape[0], mistake)
        return SILENCE_SHARE * silence + DETECTOR_SHARE * told

    def _move(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _cross_entropy(self, hidden: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
        logits = F.linear(hidden.to(self.dtype), head).float()
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(wanted.shape)

    def report(self) -> tuple[str, bool]:
        """Mean loss by skill since the last report, and whether all is finite."""
        sums, extra = self.sums.tolist(), self.extra.tolist()
        self.sums.zero_()
        self.extra.zero_()
        steps = max(extra[2], 1.0)
        parts = [
            f"{skill[:8]} {loss / count:.3f}"
            for skill, loss, count in zip(SKILLS, *sums, strict=True)
            if count
        ]
        finite = all(abs(value) < 1e30 for value in (*sums[0], *extra))
        parts += [f"index {extra[0] / steps:.3f}", f"mtp {extra[1] / steps:.3f}"]
        return f"{' '.join(parts)} {self.canary.report()}".rstrip(), finite


def _is_stored(name: str) -> bool:
    """Whether the exported file holds the matrix in NVFP4."""
    return not name.endswith("weights_proj.weight")


def compile_parts(trainer: Trainer) -> None:
    """Fuse the small operations where the machine has a compiler; say so and go on if not."""
    net = trainer.network
    try:
        torch._dynamo.config.suppress_errors = True
        torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
        made = [
            torch.compile(function, dynamic=False)
            for function in (coefficients, glu, collapse_fused, spread_fused)
        ]
        x = torch.randn(256, 24, device=trainer.device, requires_grad=True)
        base, scale = torch.zeros(24, device=x.device), torch.ones(3, device=x.device)
        made[0](x, base, scale, 4, 1e-6, 20)[2].square().sum().backward()
    except Exception as error:  # training works without the compiler
        say(f"not compiled: {type(error).__name__}: {str(error)[:300]}")
        return
    net.coefficients, net.glu, net.collapse, net.spread = made


def boosts_from(facts: dict[str, Any]) -> dict[str, float]:
    """Skills that lag get more rows."""
    scores = facts.get("evaluation", {})
    found = {name: 1.0 + 1.5 * (1.0 - scores[name]) for name in scores if name in SKILLS}
    if "retrieval 2000" in scores:
        found["retrieval"] = 1.0 + 1.0 * (1.0 - scores["retrieval 2000"])
    return found


def measure(trainer: Trainer) -> None:
    """Tokens a second and memory for each row length in each phase."""
    packer = Packer(1)
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        for progress in (0.2, 0.5, 0.9):
            batch = packer.batch(length, num_rows(trainer.plan.step_tokens, length, progress))
            _synchronise(trainer.device)
            times = []
            for _ in range(4):
                begin = time.perf_counter()
                trainer.step(batch, progress, 100.0)
                _synchronise(trainer.device)
                times.append(time.perf_counter() - begin)
            peak = torch.cuda.max_memory_allocated() / 2**30 if _on_gpu(trainer.device) else 0.0
            rate = batch.ids.size / min(times)
            say(f"length {length} phase {progress}: {rate:,.0f} tokens/s, peak {peak:.1f} GiB")


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _synchronise(device: torch.device) -> None:
    if _on_gpu(device):
        torch.cuda.synchronize()


def train(trainer: Trainer, feed: Feed, leg: int, legs: int, seconds: float) -> None:
    begin = last_log = time.perf_counter()
    steps = tokens = 0
    good = {name: weight.detach().clone() for name, weight in trainer.table.items()}
    while (elapsed := time.perf_counter() - begin) < seconds:
        progress = (leg - 1 + elapsed / seconds) / legs
        feed.progress.value = progress
        batch = feed.next()
        try:
            trainer.step(batch, progress, elapsed)
        except torch.OutOfMemoryError:
            trainer.make_room(batch.ids.shape)
            continue
        steps += 1
        tokens += batch.ids.size
        if steps % 4 == 0:
            _synchronise(trainer.device)  # the clock must not run ahead of the device
        if time.perf_counter() - last_log < LOG_SECONDS:
            continue
        last_log = time.perf_counter()
        text, finite = trainer.report()
        phase = "sparse " if progress >= trainer.plan.sparse_from else "dense "
        phase += "rounded" if progress >= trainer.plan.round_from else "exact"
        spent = last_log - begin
        say(
            f"[{progress:.3f} {phase}] step {steps} {tokens / spent:,.0f} tok/s "
            f"waits {feed.num_waits} | {text}"
        )
        if finite:
            good = {name: weight.detach().clone() for name, weight in trainer.table.items()}
            continue
        say("not finite: back to the last good weights at half the rate")
        with torch.no_grad():
            for name, weight in trainer.table.items():
                weight.copy_(good[name])
        trainer.optimizer = Optimizer(trainer.table, trainer.plan, CONFIG.o_groups)
        trainer.rate_factor *= 0.5
    _synchronise(trainer.device)
    say(f"{steps} steps, {tokens / 1e6:.1f} M tokens in {time.perf_counter() - begin:.0f} s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leg", type=int, default=1)
    parser.add_argument("--legs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=7.8, help="of this process, all in")
    parser.add_argument("--reserve", type=float, default=45.0, help="seconds kept for the end")
    parser.add_argument("--state", type=Path, help="folder of the leg before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--step-tokens", type=int, default=Plan.step_tokens)
    parser.add_argument("--muon-rate", type=float, default=Plan.muon_rate)
    parser.add_argument("--adam-rate", type=float, default=Plan.adam_rate)
    parser.add_argument("--compile", action="store_true", help="fuse small operations")
    parser.add_argument("--measure", action="store_true", help="only measure the speed")
    parser.add_argument("--eval-count", type=int, default=200)
    parser.add_argument("--eval-long", type=int, default=40)
    return parser.parse_args()


def main() -> None:
    started = time.perf_counter()
    args = arguments()
    facts: dict[str, Any] = {}
    if args.state:
        table, facts = load_state(args.state)
    else:
        table = first_weights(CONFIG, SEED)
    boosts = boosts_from(facts)
    feed = Feed(SEED + args.leg, args.step_tokens, args.workers, boosts)
    feed.progress.value = (args.leg - 1) / args.legs
    if not args.measure:
        feed.start()  # before the device is touched: workers are forks
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED + args.leg)
    torch.set_float32_matmul_precision("high")
    plan = Plan(step_tokens=args.step_tokens, muon_rate=args.muon_rate, adam_rate=args.adam_rate)
    trainer = Trainer(table, device, plan)
    if args.compile:
        compile_parts(trainer)
    say(f"{device}, {sum(t.numel() for t in table.values()) / 1e6:.2f} M weights, boosts {boosts}")
    if args.measure:
        measure(trainer)
        return
    seconds = args.minutes * 60 - args.reserve - (time.perf_counter() - started)
    try:
        train(trainer, feed, args.leg, args.legs, seconds)
    finally:
        feed.stop()
    facts = {"leg": args.leg, "legs": args.legs, "seconds": seconds}
    size = save_state(args.out, trainer.table, facts)
    say(f"state saved, {size / 1e6:.1f} MB; evaluating")
    facts["evaluation"] = evaluation(trainer, args)
    (args.out / "state.json").write_text(json.dumps(facts, indent=1) + "\n")
    say(f"done after {time.perf_counter() - started:.0f} s")


def evaluation(trainer: Trainer, args: argparse.Namespace) -> dict[str, float]:
    """Evaluate as the exported model will run: selection on, everything rounded as stored."""
    samples = all_samples(args.eval_count, args.eval_long)
    network = Network(CONFIG)  # not compiled: every batch has a different shape
    last = args.leg >= args.legs
    with torch.no_grad():
        rounded = trainer.used_weights(rounded=True)
        options = Options(dtype=trainer.dtype, select=True, rounded=True)
        stored = evaluate(network, rounded, options, samples)
        exact = Options(dtype=trainer.dtype, select=args.leg * 3 > args.legs, rounded=False)
        if last:
            exact = Options()
        plain = evaluate(network, rounded if last else trainer.table, exact, samples)
    for name, score in stored.items():
        say(f"{name:16s} as stored {100 * score:5.1f} %   exact {100 * plain[name]:5.1f} %")
    if last:
        for line in under_mistakes(network, rounded, options, samples, stored):
            say(line)
    return stored if last else plain


if __name__ == "__main__":
    main()
