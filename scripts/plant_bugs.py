"""Plant known bugs one by one and see that the tests notice each.

    python scripts/plant_bugs.py                         all of them
    python scripts/plant_bugs.py --mends                 take back mends instead
    python scripts/plant_bugs.py --only top-p prefix     those whose names contain one of these
    python scripts/plant_bugs.py -o benchmarks/records/DATE_cpu_planted_bugs.jsonl
    python scripts/plant_bugs.py -o RECORD --left        what that record does not show as noticed

A bug is one changed piece of text in a copy of the tree; the tests listed with it are the smallest
part of the suite that ought to notice. They run once on the unchanged copy, where they must pass,
and then with the bug until the first failure. A test that hangs counts as noticing: every test has
a time limit. The record is rewritten after every bug; each row names its commit. The exit code is
1 if a bug survives, or if its text is no longer found exactly once (then it needs a new home;
`tests/test_structure.py` looks for that).
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest


SCHEDULER = ("tests/scheduler",)
PREFIX = ("tests/oracle/test_prefix.py",)
PAGES = ("tests/cache/test_pages.py",)
SAMPLE = ("tests/ops/test_sample.py",)
FORMULAS = ("tests/ops/test_formulas.py",)
ENGINE = ("tests/test_engine.py",)
SERVING = ("tests/test_serving.py",)
LIMITS = ("tests/server/test_limits.py",)
FORMATS = ("tests/formats",)
STOPS = ("tests/chat/test_parser.py", "tests/test_engine.py", "-k", "stop")
FINGERPRINT = ("tests/cache/test_fingerprint.py",)
GUIDED_END = ("tests/test_guided.py", "-k", "end_inside_the_reasoning")
OPENAI = ("tests/server/test_openai.py", "-k", "calls_are or ignored or best or prompt or guides")
ANTHROPIC = ("tests/server/test_anthropic.py", "-k", "continued or threads or own_shape")
RESPONSES = ("tests/server/test_responses.py", "-k", "responses_refuse or echo or offsets")
DOORS = ("tests/server/test_limits.py", "-k", "head or abort or metrics or doors")
TINY = ("tests/server/test_tiny.py", "-k", "forced_call or its_plan")
MADE = ("tests/checkpoint/test_made.py", "-k", "were_quantised or nothing_is_wrong")
CONFIG = ("tests/test_config.py", "-k", "several_ids or hash_layer or nested_yarn")
BAD_INPUT = ("tests/checkpoint/test_bad_input.py", "-k", "header or left_alone or foreign")
CHECK = ("tests/tools/test_check.py", "tests/tools/test_commands.py",
         "-k", "embedded or never_read or cut_file or test_plan")  # fmt: skip
DOCTOR = ("tests/tools/doctor", "-k", "located and topk or located and sink or alone or crash")
OUTPUTS = ("tests/cli/test_cli.py", "-k", "outputs or full_disk or system or folders_of")

BUGS = (
    # --- found to survive before they had tests
    Bug("room to grow", "dsv4/scheduler/home.py",
        "grown = len(sequence.token_ids) + PAGE_ENTRIES[pool] * TOKENS_PER_ENTRY[pool]",
        "grown = len(sequence.token_ids)", SCHEDULER),
    Bug("head room of four-over-six", "dsv4/formats/nvfp4.py",
        'top = 256.0 if choice == "four-over-six"', 'top = 448.0 if choice == "four-over-six"',
        FORMATS),
    Bug("top-p keeps one more", "dsv4/ops/sample/sample.py",
        "keep = (before < s.top_p[i].double())", "keep = (before <= s.top_p[i].double())", SAMPLE),
    # --- hung before the engine noticed
    Bug("preemption of the wrong one", "dsv4/scheduler/scheduler.py",
        "if sequence.rank < other.rank", "if sequence.rank > other.rank", SCHEDULER),
    Bug("prefix key off by one", "dsv4/scheduler/home.py",
        "(len(sequence.token_ids) - 1) // SHARED_TOKENS",
        "len(sequence.token_ids) // SHARED_TOKENS", SCHEDULER),
    # --- scheduling and pages
    Bug("preemption starts with the lowest rank", "dsv4/scheduler/scheduler.py",
        "self._preempt(here[-1])", "self._preempt(here[0])", SCHEDULER),
    Bug("pages of an unfinished prompt forgotten", "dsv4/scheduler/home.py",
        "needed += max(len(known) - len(other.pages.columns[pool]), 0)", "needed += 0", SCHEDULER),
    Bug("a page let go while it is cached", "dsv4/cache/pages.py",
        "if self._cached[page] == 0 and self._references[page] == 0:",
        "if self._cached[page] == 0:", PAGES),
    Bug("the window gives back a page too early", "dsv4/cache/pages.py",
        "if column < oldest]", "if column <= oldest]", PAGES),
    Bug("the least recently used goes last", "dsv4/cache/prefix.py",
        "snapshot = next(iter(self._snapshots.values()))\n        if",
        "snapshot = next(reversed(self._snapshots.values()))\n        if", PREFIX),
    Bug("the hca page is not copied", "dsv4/cache/prefix.py",
        'if partial in snapshot.columns["hca"]:', "if False:", PREFIX),
    Bug("an unused older prefix stays", "dsv4/cache/prefix.py",
        "if older is not None and older.num_hits == 0:", "if False:", SCHEDULER),
    Bug("the salt is not in the key", "dsv4/cache/prefix.py",
        "salt.encode()", 'b""', PREFIX),
    Bug("a fingerprint without config.json", "dsv4/cache/fingerprint.py",
        'parts.append(("config.json", _digest(folder / "config.json")))', "pass", FINGERPRINT),
    # --- numbers
    Bug("a tie of E2M1 rounds up", "dsv4/formats/e2m1.py",
        "code += magnitude > 2.5", "code += magnitude >= 2.5", FORMATS),
    Bug("the floor of FP8 groups", "dsv4/formats/fp8.py",
        "AMAX_FLOOR = 1e-4", "AMAX_FLOOR = 1e-6", FORMATS),
    Bug("sinkhorn one round short", "dsv4/ops/mhc/mix.py",
        "for _ in range(iters - 1):", "for _ in range(iters - 2):", FORMULAS),
    Bug("yarn rounds the wrong way", "dsv4/ops/kv/rope.py",
        "low = max(math.floor(dimension(beta_fast)), 0)",
        "low = max(math.ceil(dimension(beta_fast)), 0)", FORMULAS),
    Bug("the sink is left out of the sum", "dsv4/ops/attention/attention.py",
        "total = torch.ones_like(top)", "total = torch.zeros_like(top)", FORMULAS),
    Bug("an entry is visible one token early", "dsv4/ops/attention/index.py",
        "torch.div(positions + 1, RATIO", "torch.div(positions + 2, RATIO", FORMULAS),
    Bug("index ties go to the higher entry", "dsv4/ops/attention/index.py",
        "best, order = torch.sort(scores, dim=1, descending=True, stable=True)",
        "best, order = scores.flip(1).sort(dim=1, descending=True, stable=True)\n"
        "    order = scores.shape[1] - 1 - order", FORMULAS),
    Bug("repetition also for what was not said", "dsv4/ops/sample/sample.py",
        "row = torch.where(s.seen[slot] != 0, scaled, row)", "row = scaled", SAMPLE),
    Bug("min-p of the sum", "dsv4/ops/sample/sample.py",
        "s.min_p[i].double() * probabilities[0]", "s.min_p[i].double()", SAMPLE),
    # --- chat
    Bug("a stop string held one character too long", "dsv4/chat/output/stops.py",
        "num_buffered = max(self._matched)", "num_buffered = max(self._matched) + 1",
        STOPS),
    Bug("the shorter of two stop strings", "dsv4/chat/output/stops.py",
        "len(stop) > len(found)", "len(stop) < len(found)", STOPS),
    Bug("a broken character is dropped at the end", "dsv4/chat/output/answer.py",
        "return shown if stop is not None else shown + self._stops.finish()",
        "return shown", ENGINE),
    # --- engine
    Bug("one token too many", "dsv4/engine.py",
        "if len(sequence.token_ids) >= sequence.max_len:",
        "if len(sequence.token_ids) > sequence.max_len:", ENGINE),
    Bug("a token that a guide replaced is computed with", "dsv4/engine.py",
        "if token != result.token_id:", "if False:", ("tests/test_guided.py", "-k", "replaced")),
    Bug("a slot keeps the settings of who had it before", "dsv4/runner/sampling_rows.py",
        "if self._owners[pages.slot] is not pages:", "if self._owners[pages.slot] is None:",
        ENGINE),
    Bug("a failed step ends requests before their tokens", "dsv4/engine.py",
        "live = filter(self._is_live, sequences)", "live = iter(sequences)",
        ("tests/test_engine.py", "-k", "ahead")),
    Bug("a deadline passes unnoticed", "dsv4/engine.py",
        "live.expires <= now", "live.expires <= now - 60", SERVING),
    Bug("the audit compares nothing", "dsv4/scheduler/audit.py",
        "if first == second:", "if len(first) == len(second):", SERVING),
    # --- checkpoint
    Bug("a header may be longer than its file", "dsv4/checkpoint/files/header.py",
        "if 8 + length > size:", "if length > size + 8:", BAD_INPUT),
    Bug("axes without limit", "dsv4/checkpoint/files/header.py",
        "if len(shape) > MAX_RANK:", "if False:", BAD_INPUT),
    # --- server
    Bug("any key opens", "dsv4/server/middleware.py",
        "for one in given for key in self._keys if hmac.compare_digest(one, key)]",
        "for one in given for key in self._keys]", LIMITS),
    Bug("a body one byte too large", "dsv4/server/middleware.py",
        "if len(body) > MAX_BODY_BYTES:", "if len(body) > 2 * MAX_BODY_BYTES:", LIMITS),
    Bug("other names than localhost", "dsv4/server/middleware.py",
        'name.lower().endswith(".localhost")', 'name.lower().endswith("localhost")', LIMITS),
    Bug("compressed bodies pass", "dsv4/server/middleware.py",
        'if encoding not in ("", "identity"):', "if False:", LIMITS),
    Bug("the client's request id is taken as it comes", "dsv4/server/middleware.py",
        "given if _REQUEST_ID.fullmatch(given) else", "given if given else", LIMITS),
)  # fmt: skip
# mends of bugs that users found, taken back
MENDS = (
    # --- answers
    Bug("an end inside the reasoning ends the answer", "dsv4/sampling/guided.py",
        "if self._is_active or not self._must_come or token_id not in ends:", "if True:",
        GUIDED_END),
    Bug("strict tools have no grammar", "dsv4/server/generation.py",
        " or any(tool.is_strict for tool in calls.tools)", "", OPENAI),
    Bug("a format of the answer forbids calls", "dsv4/server/generation.py",
        'guide if calls is None else Guide("structure", answer_or_calls(guide, calls))', "guide",
        OPENAI),
    Bug("any tool is allowed", "dsv4/chat/tool_choice.py",
        " and (self.allowed is None or name in self.allowed)", "", OPENAI),
    Bug("a forced call has no grammar", "dsv4/server/generation.py",
        'return Phase(forced, Guide("structure", calls.after_name(tool)))', "return Phase(forced)",
        TINY),
    Bug("top-p of everything", "dsv4/ops/sample/sample.py",
        "probabilities = torch.softmax(ordered, dim=0)",
        "probabilities = torch.softmax(row.double().sort(descending=True)[0], dim=0)", SAMPLE),
    Bug("images are ignored", "dsv4/server/generation.py",
        'if message.role != "tool" and Image.PLACEHOLDER in message.content:', "if False:",
        RESPONSES),
    Bug("a last assistant turn is answered", "dsv4/chat/requests/messages_api.py",
        'continue_final=messages[-1].role == "assistant" and not messages[-1].calls,', "",
        ANTHROPIC),
    Bug("threads are ignored", "dsv4/server/routes/messages.py",
        '.get("thread") not in (None, False)', '.get("no such field")', ANTHROPIC),
    Bug("a reference is an unknown item", "dsv4/chat/requests/responses.py",
        'elif kind == "item_reference":', 'elif kind == "no such kind":', RESPONSES),
    # --- checkpoints
    Bug("scales of stacked experts", "dsv4/checkpoint/names.py",
        "(?:_(scale_inv|activation_scale))?", "(?:_(activation_scale))?", MADE),
    Bug("MXFP4 under NVFP4's names", "dsv4/checkpoint/stored_matrix.py",
        "return exponents and len(found) == 2 and global_name not in found", "return False", MADE),
    Bug("a scale for each row", "dsv4/checkpoint/stored_matrix.py",
        "(1, cols), (1, MXFP4_GROUP)", "(1, MXFP4_GROUP)", MADE),
    Bug("scales with four axes", "dsv4/checkpoint/stored_matrix.py",
        "if len(shape) == 4 and shape[1] == shape[3] == 1:", "if False:", MADE),
    Bug("llmcompressor's names of experts", "dsv4/checkpoint/names.py",
        '"wgate": "w1", "gate_proj"', '"gate_proj"', MADE),
    Bug("one end of an answer only", "dsv4/util/config_json.py",
        "if not isinstance(listed, list):\n            return (self",
        "if True:\n            return (self", CONFIG),
    Bug("a hash layer anywhere", "dsv4/util/config_json.py",
        'if "moe" in types[:num_hash]:', "if False:", CONFIG),
    Bug("no warning about attention_factor", "dsv4/util/config_json.py",
        'if "compress" in nested and yarn.get("attention_factor") is None:', "if False:", CONFIG),
    Bug("another file blocks loading", "dsv4/checkpoint/files/index.py",
        "return not any(is_ours(tensor) for tensor in read_header(scan.folder / name))",
        "return False", BAD_INPUT),
    Bug("experts only has no name", "dsv4/checkpoint/layouts/modelopt_experts.py",
        'return multiplies and "nvfp4" not in facts.dense', "return False", MADE),
    Bug("compressed-tensors in FP8 has no name", "dsv4/checkpoint/layouts/compressed_tensors.py",
        'facts.global_divides or (facts.method == "compressed-tensors" and quantised)',
        "facts.global_divides", MADE),
    # --- tools
    Bug("trained weights are implausible", "dsv4/tools/check_values.py",
        "factor = ABSOLUTE_FACTOR if trusted else LONE_FACTOR", "factor = 2", CHECK),
    Bug("what was not read passes", "dsv4/tools/check.py",
        'undecided = partly if name not in ("files", "header") else ""', 'undecided = ""', CHECK),
    Bug("inspect of a broken file succeeds", "dsv4/cli/inspect.py",
        "if summary.num_errors:", "if False:", CHECK),
    Bug("no entry has been written yet", "dsv4/tools/doctor/cause.py",
        "if numbers.numel() == 0:", "if False:", DOCTOR),
    Bug("too small a topk is a wrong score", "dsv4/tools/doctor/plain/stations.py",
        'judged_later=("to.topk",)', "", DOCTOR),
    Bug("doctor draws no tokens", "dsv4/cli/doctor.py",
        "found.ops += check_sampling(device)", "pass", DOCTOR),
    Bug("a crash ends doctor", "dsv4/cli/doctor.py",
        "as status, _surviving(found, what):", "as status:", DOCTOR),
    Bug("advice that does not help", "dsv4/tools/plan.py",
        "if _settings(choices, config, left) is not None:", "if True:",
        ("tests/tools/test_plan.py", "-k", "advice")),
    Bug("plan forgets the context of users", "dsv4/cli/plan.py",
        "max_context=context[0] if users is not None and context else None,", "", CHECK),
    Bug("a fingerprint of the first bytes", "dsv4/cache/fingerprint.py",
        'hashlib.file_digest(file, "blake2b").hexdigest()',
        "hashlib.blake2b(file.read(4096)).hexdigest()", FINGERPRINT),
    Bug("the worker's plan is not shown", "dsv4/server/worker/main.py",
        'channel.send({"kind": "plan", "text": str(prepared)})', "pass", TINY),
    # --- protocol and errors
    Bug("ends are not ignored", "dsv4/server/generation.py",
        "ignores_end=bool(sampling.ignore_eos),", "", OPENAI),
    Bug("no least length", "dsv4/server/generation.py",
        '"min_tokens": body.min_tokens,', "", OPENAI),
    Bug("the first of several", "dsv4/server/schemas.py",
        "return max(self.n or 1, self.best_of or 1)", "return self.n or 1", OPENAI),
    Bug("no log-probabilities of the prompt", "dsv4/server/routes/chat.py",
        '**({} if scored is None else {"prompt_logprobs": scored}),', "", OPENAI),
    Bug("an older name of a guide", "dsv4/server/generation.py",
        '("regex", body.guided_regex),', "", OPENAI),
    Bug("no HEAD", "dsv4/server/json_route.py",
        'is_head = scope.get("method") == "HEAD" and "GET" in (self.methods or ())',
        "is_head = False", DOORS),
    Bug("the begin marker is echoed", "dsv4/server/routes/completions.py",
        "_Prompt((bos, *ids), 1)", "_Prompt((bos, *ids), 0)", RESPONSES),
    Bug("offsets count tokens", "dsv4/server/routes/completions.py",
        "answer.num_characters += len(answer.detokenizer.push(token))",
        "answer.num_characters += len(answer.detokenizer.push(token)) > 0", RESPONSES),
    Bug("who leaves is an error", "dsv4/server/routes/completions.py",
        'finish = "abort"', 'finish = "error"', DOORS),
    Bug("one shape of models", "dsv4/server/routes/models.py",
        'if "anthropic-version" not in request.headers:', "if True:", ANTHROPIC),
    Bug("the queue's time has another name", "dsv4/server/metrics.py",
        '"request_queue_time_seconds"', '"request_wait_time_seconds"', DOORS),
    Bug("outputs are not tried before work begins", "dsv4/util/output_paths.py",
        "_refusing(path, _try_file)", "pass", OUTPUTS),
    Bug("a folder that may not be read is a crash", "dsv4/cli/__init__.py",
        "except OSError as error:", "except ZeroDivisionError as error:", OUTPUTS),
)  # fmt: skip


def copy_tree(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def tests_pass(tree: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether they pass, and the last line that pytest wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += tests
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {' '.join(tests)}:\n" + "\n".join(lines[-20:]))
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, (failed or lines)[-1].split(" - ")[0]


def plant(tree: Path, bug: Bug) -> dict[str, object]:
    path = tree / bug.file
    right = path.read_text()
    count = right.count(bug.old)
    if count != 1:
        return {"outcome": "does not fit", "why": f"found {count} times, expected once"}
    begin = time.monotonic()
    path.write_text(right.replace(bug.old, bug.new))
    try:
        survived, line = tests_pass(tree, bug.tests)
    finally:
        path.write_text(right)
    seconds = round(time.monotonic() - begin, 1)
    outcome = "survived" if survived else "noticed"
    return {"outcome": outcome, "by": "" if survived else line, "seconds": seconds}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def facts() -> dict[str, object]:
    return {
        "what": "bugs planted one by one: does a test notice?",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "commit": commit(),
        "command": " ".join(["python", "scripts/plant_bugs.py", *sys.argv[1:]]),
    }


def commit() -> str:
    changed = git("status", "--porcelain", "--untracked-files=no", "dsv4", "tests")
    return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")


def noticed_before(path: Path) -> dict[str, dict[str, object]]:
    """Rows of a record by name; one that was noticed need not be planted again."""
    about, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return {
        row["name"]: {"commit": about["commit"], **row}
        for row in rows
        if row["outcome"] == "noticed"
    }


def write_record(path: Path, about: dict[str, object], rows: list[dict[str, object]]) -> None:
    num_noticed = sum(row["outcome"] == "noticed" for row in rows)
    lines = [{**about, "planted": len(rows), "noticed": num_noticed}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mends", action="store_true", help="take back mends")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--left", action="store_true", help="what the record does not show yet")
    parser.add_argument("-o", "--out", type=Path, help="where to write a record (JSON lines)")
    options = parser.parse_args()
    if options.left and options.out is None:
        parser.error("--left needs the record: -o RECORD")
    chosen = [
        bug
        for bug in (MENDS if options.mends else BUGS)
        if any(part in bug.name for part in options.only)
    ]
    about, left = facts(), 0
    known = noticed_before(options.out) if options.left else {}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        passing: set[tuple[str, ...]] = set()  # without any bug
        for bug in chosen:
            row = known.get(bug.name, {})
            if (row.get("old"), row.get("new")) == (bug.old, bug.new):
                rows.append(row)
                continue
            if bug.tests not in passing:
                passed, line = tests_pass(tree, bug.tests)
                if not passed:
                    raise SystemExit(f"without any bug: {line}")
                passing.add(bug.tests)
            result = plant(tree, bug)
            left += result["outcome"] != "noticed"
            rows.append({**asdict(bug), **result, "commit": about["commit"]})
            print(f"{result['outcome']:13}{bug.name}: {result.get('by', '')}", flush=True)  # noqa: T201
            if options.out is not None:
                write_record(options.out, about, rows)
    if options.out is not None:
        write_record(options.out, about, rows)
    print(f"{len(rows) - left} of {len(rows)} noticed")  # noqa: T201
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
