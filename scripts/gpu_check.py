"""Everything that must be seen on a GPU, in parts that each have their own time limit.

    python scripts/gpu_check.py pack                                # here: tools for a bare machine
    python scripts/gpu_check.py --out DIR tests tiny quality        # there
    python scripts/gpu_check.py --out DIR decode prefill pro memory
    python scripts/gpu_check.py --out DIR ops state compare parallel slices

A part that fails or runs out of time does not stop the others; what it wrote stays. Everything
printed also goes to DIR/log.txt, results to DIR/<part>.jsonl. `pack` copies what the tests need
besides torch into build/gpu_site, for machines on which nothing can be installed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "gpu_site"
PURE = (
    "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "typer", "click", "rich",
    "shellingham", "markdown_it", "mdurl", "annotated_doc",
)  # fmt: skip
TOLERANCE = 0.03  # docs/numerics.md, "A CPU and a GPU"
# most important first: a time limit cuts off what matters least
DECODE = ((1, 4096), (8, 4096), (32, 4096), (128, 4096), (1, 131072), (1, 1048576), (32, 131072))
PRO = ((1, 4096), (32, 4096), (1, 1048576))


@dataclass(frozen=True)
class Job:
    label: str
    arguments: list[str]  # of python
    limit_s: float


def pytest_job(label: str, limit_s: float, *arguments: str) -> Job:
    options = ["-m", "pytest", "-q", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider"]
    return Job(label, [*options, *arguments], limit_s)


def own_job(part: str, limit_s: float) -> Job:
    return Job(part, [str(Path(__file__)), "--run", part], limit_s)


def jobs_of(part: str) -> list[Job]:
    """Jobs of one part run side by side."""
    if part == "tests":
        kernels = "tests/ops/kernels"
        return [
            pytest_job("graphs", 420, "tests/runner/test_graphs_gpu.py"),
            pytest_job("weights", 420, f"{kernels}/test_weight_gpu.py"),
            pytest_job("state cases", 420, f"{kernels}/test_state_gpu.py", "-k", "test_cases"),
            pytest_job("state sizes", 420, f"{kernels}/test_state_gpu.py", "-k", "model_sizes"),
            pytest_job(
                "state bits", 420, f"{kernels}/test_state_gpu.py", "-k",
                "not test_cases and not model_sizes",
            ),
        ]  # fmt: skip
    if part == "parallel":  # side by side on one GPU they would wait for each other
        ranks = ["tests/parallel/test_ranks_gpu.py", "tests/ops/kernels/test_sharded_gpu.py"]
        return [pytest_job("ranks", 600, *ranks)]
    if part == "slices":
        bench = ["-m", "dsv4", "bench", "parallel", "--slices", "flash", "--layers", "8"]
        return [Job("slices", [*bench, "--record", str(OUT / "slices.jsonl")], 180)]
    limits = {"tiny": 150, "decode": 330, "prefill": 120, "pro": 180}
    limits |= {"ops": 240, "state": 180, "compare": 150, "memory": 150}
    limits["quality"] = 240
    return [own_job(part, limits[part])]


PARTS = (
    "tests", "tiny", "decode", "prefill", "pro", "ops", "state", "compare", "memory",
    "quality", "parallel", "slices",
)  # fmt: skip


class Log:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def __call__(self, label: str, text: str) -> None:
        line = f"[{label}] {text.rstrip()}"
        with self._lock:
            self._file.write(line + "\n")
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def run_job(job: Job, log: Log, failed: list[str]) -> None:
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "DSV4_CHECK_OUT": str(OUT)}
    paths = [str(ROOT), *([str(SITE)] if SITE.is_dir() else [])]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *job.arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(job.limit_s, process.kill)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        log(job.label, line)
    code = process.wait()
    late = not timer.is_alive()
    timer.cancel()
    took = time.monotonic() - begin
    if code != 0:
        failed.append(job.label)
    log(job.label, f"{'out of time' if late else f'exit {code}'} after {took:.0f} s")


def run_parts(parts: list[str]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    log = Log(OUT / "log.txt")
    failed: list[str] = []
    for part in parts:
        threads = [
            threading.Thread(target=run_job, args=(job, log, failed)) for job in jobs_of(part)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    log("all", f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


# --- the parts that are not tests: run in a process of their own ---------------------------------


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_decode(part: str, shape: str, layers: int, cases: tuple[tuple[int, int], ...]) -> None:
    from dsv4.tools.speed.report import lines_of, picture, write_record
    from dsv4.tools.speed.steps import Bench

    bench = Bench(shape, layers, DEVICE)
    say(f"{bench.ceilings}")
    rows: list = [bench.ceilings]
    for batch, context in cases:
        try:
            row = bench.decode(batch, context)
        except Exception as error:  # the next size may fit
            say(f"{shape} {batch} x {context}: {type(error).__name__}: {error}"[:2000])
            continue
        rows.append(row)
        say("\n".join(lines_of(row)))
        write_record(OUT / f"{part}.jsonl", rows)
        if len(rows) == 2:
            (OUT / f"{part}.svg").write_text(picture(row), encoding="utf-8")


def run_prefill() -> None:
    from dsv4.tools.speed.prompts import time_prompt
    from dsv4.tools.speed.report import lines_of, write_record
    from dsv4.tools.speed.steps import Bench

    bench = Bench(*SMALL or ("flash", 36), DEVICE)
    rows: list = [bench.ceilings]
    for tokens in (64,) if SMALL else (8192, 2048):
        rows.append(time_prompt(bench, tokens, 0))
        say("\n".join(lines_of(rows[-1])))
        write_record(OUT / "prefill.jsonl", rows)


def run_compare() -> None:
    from dsv4.tools.speed.compare import transformers_ms
    from dsv4.tools.speed.model import shape_config
    from dsv4.tools.speed.report import lines_of, write_record
    from dsv4.tools.speed.steps import Bench

    shape, layers = SMALL or ("flash", 4)
    ours = Bench(shape, layers, DEVICE).decode(1, 4096)
    say("\n".join(lines_of(ours)))
    theirs = transformers_ms(shape_config(shape, layers), DEVICE)
    facts = {"what": "transformers", "layers": layers, "ms": theirs, "times": theirs / ours.ms}
    say(f"transformers, {layers} layers, batch 1: {theirs:.2f} ms, {theirs / ours.ms:.1f} x ours")
    write_record(OUT / "compare.jsonl", [ours, facts])


def run_ops() -> None:
    from dsv4.tools.bench_ops import Ceilings, bench_ops, write_record

    rows: list = []
    for row in bench_ops(["flash", "pro"], (1, 8, 32, 128, 8192)):
        rows.append(row)
        if isinstance(row, Ceilings):
            say(f"{row}")
            continue
        say(f"{row.op:16} {row.shape:6} {row.tokens:5} {row.median_us:9.2f} us  x{row.ratio}")
        write_record(OUT / "ops.jsonl", rows)


def run_state() -> None:
    from benchmarks.state_ops import main

    sys.argv = ["state_ops", "--record", str(OUT / "state.jsonl")]
    main()


def run_memory() -> None:
    """The memory an engine with Flash layers uses when ready, next to the plan's figure."""
    import json

    import torch

    from dsv4.config import EngineConfig
    from dsv4.runner.runner import Chunk, Runner
    from dsv4.runner.settings import resolve
    from dsv4.tools.bench_ops import run_facts
    from dsv4.tools.plan import make_plan, with_scheme
    from dsv4.tools.plan_weights import scheme_named
    from dsv4.tools.speed.model import random_model, shape_config

    sequences, context, chunk = 8, 16384, 4096
    config = shape_config("flash", 24)
    free, total = torch.cuda.mem_get_info()
    choices = EngineConfig(
        device=DEVICE, dtype="bfloat16", kv_format="fp8", index_format="fp8", max_context=context,
        max_sequences=sequences, chunk_tokens=chunk,
    )  # fmt: skip
    settings = resolve(choices, config, has_gpu=True, memory_bytes=free)
    model, _ = random_model(config, torch.device(DEVICE))
    torch.cuda.empty_cache()
    runner = Runner(model, settings)
    pages = runner.pages.open()
    for _ in range(2):
        runner.step([Chunk(pages, [1] * chunk, 1)])
    used = total - torch.cuda.mem_get_info()[0]
    subject = with_scheme("flash", config, scheme_named("nvfp4-all"))
    plan = make_plan(subject, total, choices, contexts=(context,))
    parts = {
        "weights": sum(plan.weight_bytes.values()),
        "step": plan.step_bytes,
        "state": plan.state_bytes,
    }
    planned = sum(parts.values())
    row = {"what": "memory", "layers": 24, "sequences": sequences, "context": context}
    row |= {"chunk_tokens": chunk, "planned": parts, "planned_bytes": planned, "used_bytes": used}
    row["ratio"] = round(used / planned, 4)
    say(json.dumps(row))
    lines = [json.dumps({"run": run_facts()}), json.dumps(row)]
    (OUT / "memory.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_tiny() -> None:
    """The embedded model on both devices: the same answers, and how fast they come."""
    from dsv4 import Engine, SamplingParams

    prompts = ["What is the capital of France?", "Count from one to ten.", "2 + 2 ="]
    params = SamplingParams(max_tokens=64, temperature=0.0, seed=1)
    answers = {}
    for device in ("cpu", DEVICE):
        begin = time.monotonic()
        engine = Engine.load("tiny", device=device, max_sequences=8, max_context=4096)
        ready = time.monotonic() - begin
        begin = time.monotonic()
        answers[device] = engine.generate(prompts, params)
        took = time.monotonic() - begin
        count = sum(len(answer.token_ids) for answer in answers[device])
        say(f"{device}: ready in {ready:.1f} s, {count / took:.1f} tok/s; {engine.settings}")
    same = 0
    for here, there in zip(answers["cpu"], answers[DEVICE], strict=True):
        pairs = zip(here.token_ids, there.token_ids, strict=False)
        agree = next((i for i, (a, b) in enumerate(pairs) if a != b), len(here.token_ids))
        same += agree
        say(f"agree for {agree} of {len(here.token_ids)} tokens: {there.text[:80]!r}")
    if same < 24:
        raise SystemExit("the GPU's answers differ from the CPU's early on")


def run_quality() -> None:
    """The embedded model's table of skills on this GPU, next to a CPU's."""
    import json

    from dsv4 import Engine
    from dsv4.tools.bench_ops import run_facts
    from dsv4.tools.quality.measure import Score, measure, perplexity, read_items

    record = ROOT / "benchmarks" / "records" / "2026-11-16_quality_tiny_cpu.jsonl"
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    wanted: dict[str, float] = {}
    for formats in ("fp8", "fp8, activations bf16"):  # the latter where it was measured
        for row in lines:
            if row.get("formats") == formats and not row.get("variant") and "skill" in row:
                wanted[row["skill"]] = row["right"] / row["asked"]
    count, lengths = (4, [300]) if SMALL else (200, [2000, 8000, 16000])
    engine = Engine.load("tiny", device=DEVICE, max_sequences=32, max_context=20480)
    rows: list[dict] = [{"run": run_facts()}]

    def report(score: Score) -> None:
        row = {"skill": score.skill, "right": score.num_right, "asked": score.num_asked}
        rows.append(row | {"cpu": wanted.get(score.skill)})
        say(json.dumps(rows[-1]))
        text = "\n".join(map(json.dumps, rows)) + "\n"
        (OUT / "quality.jsonl").write_text(text, encoding="utf-8")

    scores = measure(engine, read_items("tiny"), count, lengths, report)
    rows.append({"perplexity": perplexity(engine), "settings": str(engine.settings)})
    (OUT / "quality.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    say(json.dumps(rows[-1]))
    worse = [s.skill for s in scores if s.accuracy < wanted.get(s.skill, 0.0) - TOLERANCE]
    if worse:
        raise SystemExit(f"more than 3 points below the CPU: {', '.join(worse)}")


RUNS = {
    "quality": run_quality,
    "decode": lambda: run_decode("decode", *(SMALL or ("flash", 36)), SMALL_CASES or DECODE),
    "pro": lambda: run_decode("pro", *(SMALL or ("pro", 9)), SMALL_CASES or PRO),
    "prefill": run_prefill,
    "compare": run_compare,
    "ops": run_ops,
    "state": run_state,
    "tiny": run_tiny,
    "memory": run_memory,
}


def pack() -> int:
    """Copy this environment's pure Python packages, to carry along."""
    import importlib.util

    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    for name in PURE:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            say(f"{name} is not installed here")
            continue
        source = Path(spec.origin)
        if source.name == "__init__.py":
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source.parent, SITE / name, ignore=ignored)
        else:
            shutil.copy(source, SITE)
    say(f"{SITE.relative_to(ROOT)}: {sum(f.stat().st_size for f in SITE.rglob('*')) >> 20} MiB")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "pack", []])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("DSV4_CHECK_OUT", "out")))
    parser.add_argument("--run", choices=sorted(RUNS), help="one part, in this process")
    parser.add_argument("--small", action="store_true", help="a trial on a CPU with a tiny shape")
    options = parser.parse_args()
    OUT = options.out.resolve()
    small = options.small or os.environ.get("DSV4_CHECK_SMALL") == "1"
    DEVICE = "cpu" if small else "cuda"
    SMALL = ("trial", 3) if small else None
    SMALL_CASES = ((1, 256),) if small else None
    if small:
        os.environ["DSV4_CHECK_SMALL"] = "1"
    if options.run:
        sys.path.insert(0, str(ROOT))
        OUT.mkdir(parents=True, exist_ok=True)
        RUNS[options.run]()
        sys.exit(0)
    sys.exit(pack() if options.parts == ["pack"] else run_parts(options.parts))
