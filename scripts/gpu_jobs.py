"""The jobs of each part of `gpu_check.py`: what runs, with which limits. No torch.

A part has stages, one after the other; the jobs of a stage run side by side. A test reads every
command line as the program that it starts would (tests/test_gpu_check.py).
"""

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = ROOT / "build" / "rounds"  # of `beside`; collected in one record
PART_LIMIT_S = 560.0  # a part must fit in ten minutes, with its start
KERNELS, RANKS = "tests/ops/kernels", "tests/parallel/test_ranks_gpu.py"
SIZES = ["--shape", "flash"]
TRIAL = ["--shape", "trial", "--layers", "3", "--device", "cpu"]
WEIGHTS = {  # what takes long is compiled by processes of its own
    "prompts": "matrices_of_prompts",
    "mxfp4": "mxfp4_has",
    "placed": "placed or whole_layer",
    "streams": "repeats or choose_themselves or stored or grouped_fp8",
}


@dataclass(frozen=True)
class Place:
    """Where a run writes, whether it is a trial on a CPU, and the other tree of `beside`."""

    out: Path
    small: bool = False
    beside: Path | None = None


@dataclass(frozen=True)
class Job:
    label: str
    arguments: list[str]  # of python
    limit_s: float
    tree: Path = ROOT
    record: Path | None = None  # of one round of `beside`


def pytest_job(label: str, limit_s: float, *arguments: str) -> Job:
    """Results appear test by test. `-p pytest_timeout`: packed plugins are not found by name."""
    options = ["-v", "--tb=short", "-m", "gpu", "-W", "ignore", "-p", "no:cacheprovider"]
    options += ["-p", "pytest_timeout", "--timeout", str(int(limit_s))]
    return Job(label, ["-m", "pytest", *options, *arguments], limit_s)


def own_job(part: str, limit_s: float) -> Job:
    return Job(part, ["scripts/gpu_check.py", "--run", part], limit_s)


def bench_job(label: str, limit_s: float, *arguments: str) -> Job:
    return Job(label, ["-m", "dsv4", "bench", *arguments], limit_s)


def stages_of(part: str, place: Place) -> list[list[Job]]:
    if part in OWN_LIMITS:
        return [[own_job(part, OWN_LIMITS[part])]]
    return STAGES[part](place)


def tests(_: Place) -> list[list[Job]]:
    state, weights = f"{KERNELS}/test_state_gpu.py", f"{KERNELS}/test_weight_gpu.py"
    several = "not test_cases and not model_sizes"
    named = {**WEIGHTS, "other weights": f"not ({' or '.join(WEIGHTS.values())})"}
    return [[
        pytest_job("graphs", 420, "tests/runner/test_graphs_gpu.py"),
        *(pytest_job(label, 420, weights, "-k", named[label]) for label in named),
        pytest_job("state cases", 420, state, "-k", "test_cases"),
        pytest_job("state sizes", 420, state, "-k", "model_sizes"),
        pytest_job("state bits", 420, state, "-k", several),
    ]]  # fmt: skip


def confirm(place: Place) -> list[list[Job]]:
    """All GPU tests; processes of ranks would wait for the others' kernels, so they come last."""
    [known] = tests(place)
    more = [
        pytest_job("a8", 330, f"{KERNELS}/test_a8_gpu.py"),
        pytest_job("push", 330, f"{KERNELS}/test_push_interpreter.py"),
        pytest_job("experts", 330, "tests/runner/test_experts_gpu.py"),
        pytest_job("drafts", 330, "tests/test_drafting_gpu.py"),
    ]
    [of_ranks, ranks] = parallel(place)
    first = [*known, *more, *of_ranks]
    return [[replace(job, limit_s=330.0) for job in first], ranks]


def parallel(_: Place) -> list[list[Job]]:
    """What one rank computes, compiled by several processes at once; then ranks."""
    file = f"{KERNELS}/test_sharded_gpu.py"
    names = {
        "matrices": "rows_of or vocabulary or groups",
        "ranges": "ranges_of_all",
        "all experts": "experts_of_all",
        "whole experts flash": "whole_experts and flash",
        "whole experts pro": "whole_experts and pro",
        "split experts": "split_experts",
        "heads flash": "heads and flash",
        "heads pro": "heads and pro",
    }
    of_ranks = [pytest_job(label, 300, file, "-k", names[label]) for label in names]
    return [of_ranks, [pytest_job("ranks", PART_LIMIT_S, RANKS, "-k", "not a8_rows")]]


def ranks_a8(_: Place) -> list[list[Job]]:
    """Ranks whose experts, or more, have a8 rows."""
    return [[pytest_job("ranks a8", PART_LIMIT_S, RANKS, "-k", "a8_rows")]]


def beside(place: Place) -> list[list[Job]]:
    """Two trees in turn on one machine, which differ by less than two machines do."""
    sizes, stages = TRIAL if place.small else SIZES, []
    cases = {
        "decode": ["--batch", "1,8,32,128", "--context", "4096"],
        "prefill": ["--tokens", "8192,2048"],
    }
    if place.small:
        cases = {"decode": ["--batch", "1,2", "--context", "99"], "prefill": ["--tokens", "40"]}
    trees = [("this", ROOT), ("other", place.beside or ROOT)]
    for number in (1, 2):
        for what, case in cases.items():
            for name, tree in trees:
                record = ROUNDS / f"{name} {what} {number}.jsonl"
                arguments = ["-m", "dsv4", "bench", what, *sizes, *case, "--record", str(record)]
                stages.append([Job(f"{name} {what} {number}", arguments, 180, tree, record)])
        trees.reverse()
    return stages


def drafts(place: Place) -> list[list[Job]]:
    one = ["--batch", "1", "--experts", "9.7", "--acceptance", "0.6,0.7,0.8,0.0"]
    many = ["--batch", "8,32,128", "--acceptance", "0.0"]
    common = ["--own-layers", "12", "--drafter", "mtp", "--draft-tokens", "5"]
    if not place.small:
        one += ["--tokens", "800", "--rounds", "4"]
    else:
        one[3], many[1] = "3", "2,4"
        common = [*TRIAL, "--drafter", "mtp", "--draft-tokens", "5", "--tokens", "20"]
    stages = []
    for label, case in (("drafts 1", one), ("drafts many", many)):
        record = ["--record", str(place.out / f"{label.replace(' ', '_')}.jsonl")]
        arguments = ["benchmarks/draft_speed.py", *common, *case, *record]
        stages.append([Job(label, arguments, 300)])
    return stages


def skills(place: Place) -> list[list[Job]]:
    """How many drafts of the embedded model are right, by skill; nothing is timed."""
    jobs = []
    for draft in ("mtp", "lookup"):
        case = ["--draft", draft, "--lengths", "", "--count", "1" if place.small else "15"]
        if place.small:
            case += ["--device", "cpu", "--skills", "identity"]
        record = ["--record", str(place.out / f"skills_{draft}.jsonl")]
        jobs.append(bench_job(f"skills {draft}", 200, "quality", *case, *record))
    return [jobs]


def one_gpu(place: Place) -> list[list[Job]]:
    steps = [*SIZES, "--layers", "43", "--context", "16384", "--settle", "2000"]
    memory, prompt = "auto,115,95", "8192"
    if place.small:
        steps = [*TRIAL, "--context", "99", "--settle", "2"]
        memory, prompt = "0.0001,0.00012", "40"
    steps += ["--batch", "1", "--routing", "even,zipf:1.0", "--prompt", prompt]
    steps += ["--expert-memory", memory, "--record", str(place.out / "one_gpu.jsonl")]
    stages = [[bench_job("one_gpu", 420, "decode", *steps)]]
    if not place.small:  # NVFP4 and MXFP4, both; single ops need a GPU
        ops = ["--only", "experts", "--tokens", "1,8,32,128,2048,8192"]
        ops += ["--record", str(place.out / "experts.jsonl")]
        stages.append([bench_job("experts", 140, "ops", *SIZES, *ops)])
        record = ["--record", str(place.out / "experts_one_token.jsonl")]
        stages.append([Job("one token", ["benchmarks/experts_one_token.py", *record], 90)])
    return stages


def a8(place: Place) -> list[list[Job]]:
    sizes = TRIAL if place.small else [*SIZES, "--layers", "24"]
    tokens = "40" if place.small else "8192,2048"
    steps = ["--batch", "1", "--context", "99"] if place.small else ["--batch", "1,8"]
    if not place.small:
        steps += ["--context", "4096", "--timeline", str(place.out / "a8.svg")]
    named = {"prefill": ["--tokens", tokens], "decode": steps}
    stages = [[pytest_job("a8 bits", 200, f"{KERNELS}/test_a8_gpu.py")]]
    for what, case in named.items():
        record = ["--record", str(place.out / f"a8_{what}.jsonl")]
        arguments = [what, *sizes, "--weights", "a8", *case, *record]
        stages.append([bench_job(f"a8 {what}", 200, *arguments)])
    return stages


def a8_trials(place: Place) -> list[list[Job]]:
    """What bounds the kernel of a8 prompts, and its tiles; they need a GPU."""
    stages = []
    tokens = {"product_rates": [], "a8_tiles": ["--tokens", "8192,4096,2048"]}
    for label, case in tokens.items():
        case += ["--record", str(place.out / f"{label}.jsonl")]
        stages.append([Job(label, [f"benchmarks/{label}.py", *case], 240)])
    return [] if place.small else stages


def prefill(place: Place) -> list[list[Job]]:
    case = [*TRIAL, "--tokens", "64"] if place.small else [*SIZES, "--tokens", "8192,2048"]
    record = ["--record", str(place.out / "prefill.jsonl")]
    return [[bench_job("prefill", 120, "prefill", *case, *record)]]


def slices(place: Place) -> list[list[Job]]:
    case = (
        ["--slices", "trial", "--device", "cpu", "--tp", "1,2"]
        if place.small
        else ["--slices", "flash"]
    )
    layers = ["--layers", "3" if place.small else "8"]
    record = ["--record", str(place.out / "slices.jsonl")]
    return [[bench_job("slices", 180, "parallel", *case, *layers, *record)]]


OWN_LIMITS = {
    "tiny": 150.0, "decode": 330.0, "pro": 180.0, "ops": 240.0, "state": 180.0,
    "compare": 150.0, "memory": 150.0, "quality": 240.0,
}  # fmt: skip
STAGES = {
    "tests": tests, "confirm": confirm, "parallel": parallel, "beside": beside, "drafts": drafts,
    "skills": skills, "one_gpu": one_gpu, "a8": a8, "a8_trials": a8_trials, "prefill": prefill,
    "slices": slices, "ranks_a8": ranks_a8,
}  # fmt: skip
PARTS = (*STAGES, *OWN_LIMITS)
