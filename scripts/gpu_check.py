"""Everything that must be seen on a GPU, in parts that each have their own time limit.

    python scripts/gpu_check.py pack                                # here: tools for a bare machine
    python scripts/gpu_check.py --out DIR tests tiny quality        # there
    python scripts/gpu_check.py --out DIR decode prefill pro memory
    python scripts/gpu_check.py --out DIR ops state compare parallel slices
    python scripts/gpu_check.py --out DIR confirm                   # these: one call each
    python scripts/gpu_check.py --out DIR --beside OTHER beside     # OTHER: another commit's tree
    python scripts/gpu_check.py --out DIR drafts | skills | one_gpu | a8 | a8_trials | ranks_a8

A part that fails or runs out of time does not stop the others; what it wrote stays. Each takes less
than ten minutes. An OTHER in a folder that git ignores, like build/beside, can be carried along:
`git archive COMMIT | tar -x -C build/beside`; copy this tree's dsv4/tools/speed/prompts.py to one
like 861df37, whose bench did not capture prompts. `gpu_jobs.py` lists what parts run. Everything
printed also goes to DIR/log.txt, results to DIR/<part>.jsonl. `pack` copies what the tests need
besides torch into build/gpu_site, for machines on which nothing can be installed.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.gpu_jobs import PART_LIMIT_S, PARTS, ROOT, ROUNDS, Job, Place, stages_of

SITE = ROOT / "build" / "gpu_site"
# typer is expected there: new versions need pydantic, which is not pure
PURE = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest_timeout")
LEAST_S, GRACE_S = 10.0, 10.0  # a job needs to start, and gets to end after an interrupt
TOLERANCE = 0.03  # docs/numerics.md, "A CPU and a GPU"
OUT, DEVICE = Path("out"), "cuda"
# most important first: a time limit cuts off what matters least
DECODE = ((1, 4096), (8, 4096), (32, 4096), (128, 4096), (1, 131072), (1, 1048576), (32, 131072))
PRO = ((1, 4096), (32, 4096), (1, 1048576))


class Log:
    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()

    def __call__(self, label: str, text: str) -> None:
        line = f"[{label}] {text.rstrip()}"
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            say(line)


def run_job(job: Job, log: Log, failed: list[str], deadline: float) -> None:
    begin = time.monotonic()
    limit = min(job.limit_s, deadline - begin)
    if deadline - begin < LEAST_S:
        failed.append(job.label)
        log(job.label, "not started: no time left for this part")
        return
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "DSV4_CHECK_OUT": str(OUT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # jobs name what they need
    environment["GIT_CEILING_DIRECTORIES"] = str(job.tree.parent)  # its own commit or none
    paths = [str(job.tree), *([str(SITE)] if SITE.is_dir() else [])]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *job.arguments],
        cwd=job.tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # ended with its own processes
    )
    # pytest tells what failed so far when interrupted
    timers = [
        threading.Timer(limit, end_group, (process, signal.SIGINT)),
        threading.Timer(limit + GRACE_S, end_group, (process, signal.SIGKILL)),
    ]
    for timer in timers:
        timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        log(job.label, line)
        if job.record is not None:
            collect_rounds()
    process.stdout.close()
    code = process.wait()
    late = not timers[0].is_alive()
    for timer in timers:
        timer.cancel()
    took = time.monotonic() - begin
    if code != 0:
        failed.append(job.label)
    log(job.label, f"{'out of time' if late else f'exit {code}'} after {took:.0f} s")


def end_group(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_parts(parts: list[str], place: Place) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    log = Log(OUT / "log.txt")
    failed: list[str] = []
    shutil.rmtree(ROUNDS, ignore_errors=True)
    for part in parts:
        deadline = time.monotonic() + PART_LIMIT_S
        for stage in stages_of(part, place):
            threads = [
                threading.Thread(target=run_job, args=(job, log, failed, deadline)) for job in stage
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if part == "beside":
            for line in differences(collect_rounds()):
                log(part, line)
    log("all", f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


# --- two trees side by side -----------------------------------------------------------------------


def collect_rounds() -> list[dict[str, Any]]:
    """All rounds so far in one record, since few files come back from some machines."""
    found = []
    for path in sorted(ROUNDS.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        tree, _, number = path.stem.split()
        for line in path.read_text(encoding="utf-8").splitlines():
            found.append({"tree": tree, "round": int(number), **json.loads(line)})
    text = "".join(json.dumps(row) + "\n" for row in found)
    (OUT / "beside.jsonl").write_text(text, encoding="utf-8")
    return found


def differences(rows: list[dict[str, Any]]) -> list[str]:
    """For each size, the median of this tree against the other's, in percent."""
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        if "result" in row:
            result = row["result"]
            size = tuple(result[name] for name in ("what", "batch", "context"))
            times.setdefault(size, {}).setdefault(row["tree"], []).append(result["ms"])
    lines = []
    for (what, batch, context), by in times.items():
        name = f"{what} {batch} x {context}"
        if len(by) < 2:
            lines.append(f"{name}: only of {', '.join(by)}")
            continue
        this, other = (statistics.median(by[tree]) for tree in ("this", "other"))
        spread = max((max(found) - min(found)) / min(found) for found in by.values())
        lines.append(
            f"{name}: this {this:.4f} ms, other {other:.4f} ms, {100 * (this / other - 1):+.2f} %; "
            f"rounds differ by {100 * spread:.2f} %"
        )
    return lines or ["nothing was timed"]


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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "pack", []])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("DSV4_CHECK_OUT", "out")))
    parser.add_argument("--run", choices=sorted(RUNS), help="one part, in this process")
    parser.add_argument("--small", action="store_true", help="a trial on a CPU with a tiny shape")
    parser.add_argument("--beside", type=Path, help="the other tree, for the part of that name")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children must not ignore it
    parser = make_parser()
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
    if options.parts == ["pack"]:
        sys.exit(pack())
    if "beside" in options.parts:
        if options.beside is None or not (options.beside / "dsv4" / "__main__.py").is_file():
            parser.error(f"--beside is {options.beside}, expected a folder with another tree")
        options.beside = options.beside.resolve()
    sys.exit(run_parts(options.parts, Place(OUT, small, options.beside)))
