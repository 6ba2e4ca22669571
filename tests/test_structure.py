"""The shape of the package: who may import whom, what runs without torch, how long things are.

Each rule is a function from sources to a list of complaints, so that it can be shown to see a
violation as well as to find none.
"""

import ast
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dsv4"

BASE = ("errors", "util", "config", "request")
BANDS: dict[str, int] = {
    **dict.fromkeys(BASE, 0),
    **dict.fromkeys(("formats", "parallel"), 1),
    "ops": 2,
    **dict.fromkeys(("cache", "checkpoint", "chat", "sampling"), 3),
    **dict.fromkeys(("model", "scheduler", "testing"), 4),
    "runner": 5,
    "pipeline": 6,
    "engine": 7,
    **dict.fromkeys(("server", "tools"), 8),
    "deploy": 9,
    "cli": 10,
    "__main__": 11,
}

# Inside `ops` imports point only to the left; `ops/__init__.py` is the table of all ops.
OPS_ORDER = (
    *("core", "norm", "gemm", "kv", "mhc", "moe", "attention", "sample", "comm", "fused"),
    "cpu",
)
KERNEL_FILES = ("_triton.py", "_gluon.py", "_device.py")

# These start without torch: their tests run anywhere and `--help` is instant. Some come later.
WITHOUT_TORCH = (
    "dsv4",
    "dsv4.errors",
    "dsv4.util.config_json",
    "dsv4.config",
    "dsv4.request",
    "dsv4.formats.spec",
    "dsv4.formats.entry",
    "dsv4.parallel.layout",
    "dsv4.parallel.commands",
    "dsv4.parallel.team",
    "dsv4.chat",
    "dsv4.scheduler",
    "dsv4.cache.geometry",
    "dsv4.cache.pages",
    "dsv4.cache.prefix",
    "dsv4.checkpoint.names",
    "dsv4.checkpoint.files.header",
    "dsv4.server.schemas",
    "dsv4.cli",
)

MAX_FILE_LINES = 600
EXPLAIN_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
MAX_FILES = 12
LONG_FUNCTIONS: frozenset[str] = frozenset()  # "dsv4/x.py:function", each with its reason here

# Met by removing, not by raising. What another issue adds goes into the table, or, in files of its
# own, into OPS_OF_OTHER_ISSUES.
OWN_OPS_LINES = 10500
# Added minus deleted, and the commits: `git show -M --numstat COMMIT -- dsv4/ops`, without files of
# OPS_OF_OTHER_ISSUES; of a commit that also moved lines of ops themselves, only `commit:files`.
LINES_IN_FILES_OF_OPS = {
    "steps as functions of fixed buffers, cold starts": (
        198,
        "bf28ec3:ragged.py,compile_triton.py 87d032d",
    ),
    "checkpoints of other tools": (10, "df4134b"),
    "ranks": (153, "fbf565c 9eba700 f566750"),
    "drafts": (38, "cf89936 080c2db f224a1a b75e9fd 397f397"),
    "MXFP4 as stored, experts in host memory": (205, "3d8e6d3 c80b3b9"),
    "weight streams, both ranges of K at a time": (
        126,
        "8cdf976 62523a3 c070160:dot_device.py,experts_single_token_triton.py,experts_triton.py",
    ),
    "other GPUs": (60, "474c187 cf35333"),
    "few rows on a CPU, any number of threads and any CPU": (79, "d1a0ad8 f5137e5 2f70531"),
    "official checkpoints on one GPU: FP8 in streams and prompts": (
        67,
        "cc17e39 45f1b5a 60558af f369d0f bf128d3",
    ),
    "FP8 rows as trained, prompts": (
        258,
        "34848e0 aab6c0d 5bca901 fc3cc07 a7341ae 3b2cae0 be2488d 07f4dfd ce8421d 78aaf12 "
        "a13b5ba 0c8e01a 663f8d8 d0152c4 31c7381 aaa45c5",
    ),
}

# Lines of each part, with room to grow; more than this is a decision, not an accident.
LINE_BUDGET = {
    "engine.py": 600,
    # 30 for drafts that are made on the device, and their times; 50 for steps ahead of their count
    "pipeline.py": 400,
    "config.py": 420,  # options of ranks and nodes, of drafts; choices that type checkers see
    "request.py": 420,
    "errors.py": 80,
    "testing.py": 300,
    "util": 809,  # most of it config.json in three spellings, and its mistakes; 55: rates of GPUs,
    # 36: descriptors above 1023
    "formats": 1500,
    # 300 for other nodes: keys, joining, torchrun; 90 for failures at start, of links, of parents
    # 30 for names in time: when a command is late, while ranks connect, told to who owns the engine
    "parallel": 1845,  # 21: memory of NCCL; 94: bad inputs from other machines, addresses
    # Its own lines, and what other issues added to its files; their own files are counted apart
    "ops": OWN_OPS_LINES + sum(count for count, _ in LINES_IN_FILES_OF_OPS.values()),
    # 170 for experts split over ranks, their count, an echo; 320 for fusions of few rows on a CPU
    # 360 for streams of FP8 and bf16, and of experts by a table; FP8 as bf16 in prompts
    # 730 for FP8 products on sm_90, 770 for those of prompts: kernels of matrices and of experts
    # 280 for prompts' matrices in bf16, 25 for experts with few rows
    # 310 for scores and selection of prompts, 15 for experts whose products fit their rows
    # 430 for a token's weights as streams with a8, 85 for ranks with a8
    # 285 for mHC's update of prompts, 276 for copies of their attention, 34 for rows that wo_a
    # leaves; a8 matrices of prompts have 50 less; 64 for selection with a comparison a pass, 30
    # for tiles of bf16 matrices
    "ops of other issues": 7250,
    "cache": 1500,
    "checkpoint": 3000,
    "chat": 4500,
    "sampling": 700,
    "model": 1600,
    # 160 for homes: where a sequence runs, what a home has room for; 60 for drafts made on demand
    # 20 for states with NaN, 2 for drafts that are all verified, 33 for NaN in drafts
    "scheduler": 1340,  # 40 for what the sequences of a batch learn from each other
    # 300 for ranks: starting them, following commands; 550 for layouts: their forecast, the choice;
    # 150 for where ranks meet;
    # 830 for drafts
    # 840 for experts in host memory: what fits, moving them in pieces, which ones stay, and a
    # warm-up that takes the memory of the largest step
    # 100 for DSpark, 130 for cards, what they cannot do and were measured to do, their buses
    # 220 for attention by sequences: lines, state and copies of several homes, their forecast
    # 40 for what a rank computes besides its share, as measured; 20 for the rows of a8
    # 10 for damaged draft files, NaN in drafts; 20 for options of ranks checked before nodes join
    # 20 for swaps that fail, and counts of more steps
    # 114 for what a forecast of ranks assumes, what ranks compare, and the fullest rank's plan
    # 50 for the threads of two engines, 16 for fewer launches of drafts; 7 for profiles, 15: buses
    # 22 for an owner that hears of a failed rank, 13 for plans with --comm
    # 12 for what a first draft begins with; 6 for sizes of ranks that are counted once
    # 24 for the default activations of official checkpoints on sm_90
    "runner": 5982,  # 120 for ranks on GPUs, 90 for several steps in flight, 30 for split experts
    # 3 for an engine that is stopped while it loads, 10 for origins that no browser sends, the
    # address while it ends, and a lost tokenizer
    "server": 4917,  # three protocols with the fields that clients of other servers send
    # 550 lines for traffic at an engine and at a server, its figures and its picture
    # 450 for experts in host memory: their bench and plan
    # 90 for reports of any card: nothing private, an end
    # 640 for reports of every case: compiling ahead, worker processes, fused steps
    # 25 for converting to the official formats, 80 for timing them and chunks of long prompts
    # 40 for what belongs to experts in a step's profile, and what several GPUs keep free for a8
    # 100 for acceptance of drafts by skill, damaged draft files in reports; 40 for times where all
    # experts fit
    # 67 for the random model of the doctor of ranks and the commands of a layout, 7 for its
    # sizes counted once; 18 for random weights as `auto` multiplies them
    # 1 for mHC of prompts in a profile
    "tools": 10532,  # 405 for layouts over several GPUs and slices, 200 for the doctor of ranks
    # 200 for plans over several GPUs and join; 8 for exit codes of dead ranks, 3 for draft files
    # 5 for choices that type checkers see; 16 for options of plan that would mean nothing,
    # 3 for empty prompts and wrong efforts, 4 for terminals without boxes
    # 22 for options of doctor that would mean nothing
    "cli": 2771,  # 9 for commands of a layout, and rates that tell something
    "deploy": 1000,
    "__main__.py": 20,  # 10 for Ctrl-C during imports
}


# Files of `ops` that came with other issues than its own order (24): ranks on GPUs, drafts, steps
# that are told everything by one line of integers, pipeline stages, experts in host memory,
# forms of references for few rows on a CPU, streams of weights on Hopper.
OPS_OF_OTHER_ISSUES = (
    "attention/variants/prefill_copy_gluon.py",
    "attention/variants/prompt_*.py",
    "comm/*.py",
    "core/gpu.py",
    "cpu/*.py",
    "fused/output_rows_triton.py",
    "gemm/a8/*.py",
    "gemm/variants/prompt_gluon.py",
    "gemm/variants/stream_gluon.py",
    "gemm/variants/stream_stored_gluon.py",
    "gemm/weights/expand_fp8_triton.py",
    "gemm/weights/a8.py",
    "kv/begin_step*.py",
    "mhc/stage_end_triton.py",
    "mhc/update_prompt_gluon.py",
    "moe/a8/*.py",
    "moe/experts_stream_gluon.py",
    "moe/placed.py",
    "sample/accept*.py",
    "sample/draft_rows*.py",
    "sample/verify*.py",
)


DOTTED_NAME = r"dsv4(\.\w+)+\.?"  # ends with a dot where a {name} follows


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@lru_cache(1)  # all rules read a file, then the next one
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@lru_cache(1)
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source)))


def part_of(path: Path) -> str:
    """`dsv4/ops/kv/pool.py` belongs to `ops`, `dsv4/engine.py` to `engine`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(
    tree: ast.AST, path: Path, within: tuple[str, ...] = ("dsv4",), besides: Iterable[ast.AST] = ()
) -> Iterable[str]:
    """Full names of everything imported anywhere in a file, relative imports resolved; modules
    imported from a package `within` by name. Modules named by a text count, too: `Kernel(...)`,
    `import_module(...)`; not those `besides`."""
    package = ["dsv4", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module in within:  # `from dsv4 import errors`
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module
        elif node in besides:
            continue
        elif isinstance(node, ast.Constant) and re.fullmatch(DOTTED_NAME, str(node.value)):
            yield str(node.value).rstrip(".")


def band_complaints(path: Path, source: str) -> list[str]:
    part = part_of(path)
    if path == PACKAGE / "__init__.py":
        return []  # the lazy door: it names the public classes' homes and imports none
    where = path.relative_to(ROOT)
    if part not in BANDS:
        return [f"{where}: {part!r} is in no band"]
    complaints = []
    for name in imported(parsed(source), path):
        target = name.split(".")[1] if name.startswith("dsv4.") else None
        if target is None or target == part:
            continue
        if target not in BANDS:
            if name.count(".") > 1 or (PACKAGE / target).exists():
                complaints.append(f"{where} imports {name}, which is in no band")
            continue
        in_base = part in BASE and target in BASE
        allowed = BASE.index(target) < BASE.index(part) if in_base else BANDS[target] < BANDS[part]
        if not allowed:
            complaints.append(f"{where} imports {name}: {target} is not below {part}")
    return complaints


def named_for_cpu(tree: ast.AST) -> set[ast.AST]:
    """What is loaded on the first use on a CPU, though right of all: `on_cpu="dsv4.ops.cpu.x"`
    or a constant ON_CPU."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        says = isinstance(node, ast.keyword) and node.arg == "on_cpu"
        if isinstance(node, ast.Assign):
            says = any("ON_CPU" in ast.unparse(target) for target in node.targets)
        if says:
            texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
            found |= {text for text in texts if exists(str(text.value)) and ".cpu." in text.value}
    return found


def ops_complaints(path: Path, source: str) -> list[str]:
    """Families of ops import only those to their left in OPS_ORDER."""
    ops = PACKAGE / "ops"
    if not path.is_relative_to(ops) or path == ops / "__init__.py":
        return []
    where, family = path.relative_to(ROOT), path.relative_to(ops).parts[0]
    if family not in OPS_ORDER:
        return [f"{where}: {family!r} is no family of ops"]
    complaints = []
    tree = parsed(source)
    for name in imported(tree, path, ("dsv4", "dsv4.ops"), named_for_cpu(tree)):
        target = name.split(".")[2] if name.startswith("dsv4.ops.") else None
        if name == "dsv4.ops":
            complaints.append(f"{where} imports the table of all ops")
        elif target is not None and target not in OPS_ORDER:
            complaints.append(f"{where} imports {name}, which is in no family")
        elif target is not None and OPS_ORDER.index(target) > OPS_ORDER.index(family):
            complaints.append(f"{where} imports {name}: {target} is right of {family}")
    return complaints


def triton_complaints(path: Path, source: str) -> list[str]:
    may = path.name.endswith(KERNEL_FILES)
    where = path.relative_to(ROOT)
    complaints = []
    names = {name.split(".")[0] for name in imported(parsed(source), path)}
    if "triton" in names and not may:
        complaints.append(f"{where} imports triton")
    if "mypy: ignore-errors" in source and not may:
        complaints.append(f"{where} switches mypy off")
    return complaints


def size_complaints(path: Path, source: str) -> list[str]:
    where = path.relative_to(ROOT)
    lines = source.splitlines()
    complaints = []
    if len(lines) >= MAX_FILE_LINES:
        complaints.append(f"{where} has {len(lines)} lines; split it")
    elif len(lines) > EXPLAIN_FILE_LINES and "long because" not in lines[0].lower():
        complaints.append(f"{where} has {len(lines)} lines; its first line must say why")
    most = MAX_KERNEL_LINES if path.name.endswith(KERNEL_FILES) else MAX_FUNCTION_LINES
    for node in nodes(source):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length >= most and f"{where}:{node.name}" not in LONG_FUNCTIONS:
            complaints.append(f"{where}: {node.name} has {length} lines, expected below {most}")
    return complaints


MAX_PARAMETERS = 30


def parameter_complaints(path: Path, source: str) -> list[str]:
    """Kernels, and functions that they call, take what belongs together as named tuples."""
    where, complaints = path.relative_to(ROOT), []
    for node in nodes(source):
        if not isinstance(node, ast.FunctionDef):
            continue
        is_kernel = any("jit" in ast.unparse(mark) for mark in node.decorator_list)
        args = node.args
        count = len([*args.posonlyargs, *args.args, *args.kwonlyargs])
        count += (args.vararg is not None) + (args.kwarg is not None)
        if is_kernel and count > MAX_PARAMETERS:
            complaints.append(f"{where}: {node.name} has {count} parameters")
    return complaints


FUSED = "dsv4.ops.fused"
NOT_IN_THE_MODEL = {".attempt(", ".run(", "Arguments", "dict[str, Any]"}


def plain_complaints(path: Path, source: str) -> list[str]:
    """The model makes typed calls; what runs fused is known to `ops/fused` and to those above."""
    part, where = part_of(path), path.relative_to(ROOT)
    complaints = []
    if part == "model":
        complaints += [f"{where} says {word}" for word in NOT_IN_THE_MODEL if word in source]
    if path.parent == PACKAGE / "ops" / "fused" or part in ("runner", "tools"):
        return complaints
    for node in nodes(source):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        names = [alias.name for alias in node.names]
        inside = [module, *names, *(f"{module}.{name}" for name in names)]
        if part != "model" and any(f"{name}.".startswith(f"{FUSED}.") for name in inside):
            complaints.append(f"{where} imports {FUSED}")
        elif module == "dsv4.ops.core.op" and "Fusion" in names:
            complaints.append(f"{where} imports Fusion")
    return complaints


# Sums never cross ranks: nothing that reduces, and no object that travels as a pickle.
REDUCING = ("all_reduce", "allreduce", "reduce_scatter", "ReduceOp", "all_gather_object",
            "broadcast_object_list", "gather_object", "scatter_object_list")  # fmt: skip
MAY_EXCHANGE = ("parallel", "runner", "testing")


def exchange_complaints(path: Path, source: str) -> list[str]:
    """Ranks hand each other rows and parts; only one file of the model knows that there are any."""
    where = path.relative_to(ROOT)
    names = {node.attr for node in nodes(source) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes(source) if isinstance(node, ast.Name)}
    found = {
        name
        for name in names
        if any(name.startswith(word) for word in REDUCING) or name in REDUCING
    }
    complaints = [f"{where} says {name}" for name in sorted(found)]
    knows = part_of(path) in MAY_EXCHANGE or path == PACKAGE / "model" / "exchange.py"
    calls = {"gather", "exchange"} & {
        node.func.attr
        for node in nodes(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "comm"
    }
    if calls and not knows:
        complaints.append(f"{where} exchanges with other ranks")
    return complaints


# What engines of a process would share, and a closed one would leave behind; each with its reason.
SHARED = {
    "dsv4/ops/attention/attention_triton.py: variant_costs": "a file's figures, only read",
    "dsv4/ops/core/gpu.py: _found": "facts about the machine",
    "dsv4/ops/cpu/arrays.py: fp32": "up to 256 constants of four bytes",
    "dsv4/runner/ranks/versions.py: code_digest": "of the files of the package",
    "dsv4/runner/ranks/forecast.py: visited": "a few numbers by layout, slow to draw",
    "dsv4/runner/ranks/forecast.py: prompt_flops": "three numbers by layout",
}
HOLDS_STATE = ("ops", "model", "runner")
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MAKE_CONTAINERS = {
    *("dict", "list", "set", "local", "defaultdict", "deque", "OrderedDict", "Counter", "Queue"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "lru_cache", "cache"),
}
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("remove", "setdefault", "update"),
}


def changed_names(tree: ast.AST) -> set[str]:
    """Names of containers that are changed in place: `a[k] = v`, `a.append(v)`, `a |= b`."""
    found = set()
    for node in ast.walk(tree):
        held: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            held = node.value
        elif isinstance(node, ast.AugAssign):
            held = node.target
        elif isinstance(node, ast.Attribute) and node.attr in CHANGES:
            held = node.value
        if isinstance(held, ast.Name):
            found.add(held.id)
    return found


def called(node: ast.AST) -> str:
    """`lru_cache` of `functools.lru_cache(maxsize=1)`; empty for what is no call or name."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def shared_complaints(path: Path, source: str) -> list[str]:
    """State belongs to an engine. A module may have tables: filled where they are defined, under a
    name in capitals, and never changed."""
    where = path.relative_to(ROOT)
    if part_of(path) not in HOLDS_STATE:
        return []
    tree = parsed(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found, changed = [], changed_names(tree)
    for node in [*tree.body, *(part for one in classes for part in one.body)]:
        if isinstance(node, ast.FunctionDef):
            if any(called(mark) in ("lru_cache", "cache") for mark in node.decorator_list):
                found.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name, value = ast.unparse(target), node.value
            made = isinstance(value, ast.Call) and called(value) in MAKE_CONTAINERS
            is_table = name.isupper() and ast.unparse(value) not in ("{}", "[]")
            is_list = isinstance(value, CONTAINERS) and not (is_table and name not in changed)
            if (made or is_list) and name != "__all__":
                found.append(name)
    return [f"{where}: {name} is shared" for name in found if f"{where}: {name}" not in SHARED]


def test_what_is_shared_exists() -> None:
    for entry in SHARED:
        path, name = entry.split(": ")
        assert f"def {name}(" in (ROOT / path).read_text(), entry


RULES = {
    "bands": band_complaints,
    "shared": shared_complaints,
    "ops": ops_complaints,
    "exchange": exchange_complaints,
    "triton": triton_complaints,
    "sizes": size_complaints,
    "parameters": parameter_complaints,
    "plain": plain_complaints,
}


# What checks shares no code with what it checks (docs/numerics.md): all it may import of dsv4.
INDEPENDENT: dict[str, tuple[str, ...]] = {
    "dsv4/tools/formulas.py": ("dsv4.config",),
    "dsv4/tools/doctor/plain/layer.py": ("dsv4.config", "dsv4.tools"),  # formulas; no ops, no model
    "dsv4/tools/doctor/plain/sampling.py": ("dsv4.request",),
    "dsv4/tools/doctor/plain/weights.py": ("dsv4.checkpoint",),  # where the bytes are, not values
    "tests/ops/test_formulas.py": ("dsv4.ops", "dsv4.formats.entry"),  # under test; no dsv4.tools
    "tests/oracle/plain_block.py": ("dsv4.config",),
    "tests/checkpoint/bits.py": (),
    "tests/checkpoint/writers.py": ("dsv4.checkpoint.names", "dsv4.config"),
}


@pytest.mark.parametrize("path", INDEPENDENT)
def test_what_checks_shares_no_code_with_what_it_checks(path: str) -> None:
    found = imported(ast.parse((ROOT / path).read_text()), PACKAGE / "x.py")
    shared = [name for name in found if name.split(".")[0] in ("dsv4", "training")]
    assert [name for name in shared if not name.startswith(INDEPENDENT[path])] == []


def defined_types(source: str) -> set[str]:
    """Classes and type aliases of a module; an alias is an assigned name like `StepShape`."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        names = [node.name] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        found |= {name for name in names if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name)}
    return found


def double_names(sources: dict[str, str]) -> list[str]:
    """Classes and type aliases that are defined in more than one file."""
    homes: dict[str, list[str]] = {}
    for path, source in sources.items():
        for name in defined_types(source):
            homes.setdefault(name, []).append(path)
    return sorted(f"{name}: {', '.join(at)}" for name, at in homes.items() if len(at) > 1)


def test_a_type_has_one_home() -> None:
    alias = "Step = tuple[int, int]\nT = 1\nSTEP = 1"
    assert double_names({"a": "class Step: ...", "b": alias, "c": alias}) == ["Step: a, b, c"]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    assert double_names(sources) == []


def test_a_kernel_file_has_a_name_of_its_own() -> None:
    """`Kernel.name`, by which plans and reports name what serves an op, is the file's name."""
    names = Counter(path.stem for path in modules() if path.name.endswith(KERNEL_FILES))
    assert [name for name, count in names.items() if count > 1] == []


# Names that said too little, or one name for several things.
GIVEN_UP = {
    *("Parts", "Forms", "form_of", "FORM", "ATTEND", "CHOOSE", "Order", "chat_order", "Work"),
    *("Running", "Copies", "Loaded", "Draw", "_held", "_heard", "unheard", "parting", "_tell_of"),
    *("_give_up", "_is_coming", "num_held", "rooms"),
    *("RouteTable", "parts_at", "_sum_parts", "_grown", "StepKey", "_take_token", "_take_drafts"),
    *("_take_messages", "_take_outputs", "_take_answer"),
}


def given_up_names(source: str) -> set[str]:
    found: set[str] = set()
    for node in nodes(source):
        for field in ("id", "attr", "name", "arg"):  # names, attributes, definitions, parameters
            found |= {getattr(node, field, None)} & GIVEN_UP
    return found


def test_names_that_were_given_up_stay_away() -> None:
    assert given_up_names("class Parts:\n    def f(self, rooms): self._held = Work") == {
        *("Parts", "rooms", "_held", "Work"),
    }
    found = {str(path): given_up_names(path.read_text()) for path in modules()}
    assert {name: odd for name, odd in found.items() if odd} == {}


# The first only names a type of the second, which holds it.
TYPES_ONLY = {
    ("dsv4.server.worker.mailbox", "dsv4.server.worker.link"),
}


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Modules by name -> those they import anywhere, functions and TYPE_CHECKING included."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        found = graph.setdefault(name, set())
        for node in nodes(source):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inside & sources.keys() or {node.module}
        allowed = {to for to in found if (name, to) not in TYPES_ONLY}
        graph[name] = (allowed & sources.keys()) - {name, "dsv4"}  # `dsv4` imports lazily
    return graph


def first_cycle(sources: dict[str, str]) -> list[str]:
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    mutual = {"a": "from b import x", "b": "def f():\n    import a"}
    assert first_cycle(mutual) in (["a", "b", "a"], ["b", "a", "b"])
    sources = {}
    for path in modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    assert first_cycle(sources) == []


def test_every_module_keeps_the_rules() -> None:
    found = []
    for path in modules():
        source = path.read_text()
        found += [text for complaints in RULES.values() for text in complaints(path, source)]
    assert not found, "\n".join(found)


def kernel_of(count: int) -> str:
    names = ", ".join(f"a{i}" for i in range(count))
    return f'@triton.jit(do_not_specialize=["a0"])\ndef f({names}):\n    pass\n'


@pytest.mark.parametrize(
    ("rule", "path", "source", "says"),
    [
        ("bands", "ops/core/op.py", "from dsv4.model import moe", "model is not below ops"),
        ("bands", "cache/x.py", "from dsv4.chat.texts import BOS", "chat is not below cache"),
        ("bands", "ops/x.py", "def f():\n    import dsv4.engine", "engine is not below ops"),
        ("bands", "ops/x.py", "if TYPE_CHECKING:\n    from dsv4 import cache", "cache is not"),
        ("bands", "ops/kv/x.py", "from ...engine import Engine", "engine is not below ops"),
        ("bands", "util/x.py", "from dsv4.config import ModelConfig", "config is not below util"),
        ("bands", "config.py", "from dsv4.request import Request", "request is not below config"),
        ("bands", "model/x.py", "import dsv4.scheduler", "scheduler is not below model"),
        ("bands", "model/x.py", "import dsv4.testing", "testing is not below model"),
        ("bands", "ops/x.py", 'import_module("dsv4.runner.load")', "runner is not below ops"),
        ("bands", "newpart/x.py", "", "no band"),
        ("bands", "cli/x.py", "import dsv4.unknown.part", "no band"),
        ("ops", "ops/kv/x.py", "from dsv4.ops.attention.index import index_select", "right of kv"),
        ("ops", "ops/core/x.py", "def f():\n    import dsv4.ops.norm.rms_norm", "right of core"),
        (
            "ops",
            "ops/gemm/x.py",
            "if TYPE_CHECKING:\n    from dsv4.ops import moe",
            "right of gemm",
        ),
        ("ops", "ops/moe/x.py", "from ..fused import block", "right of moe"),
        ("ops", "ops/moe/x.py", "import dsv4.ops", "the table of all ops"),
        ("ops", "ops/moe/x.py", "from dsv4.ops import OPS", "in no family"),
        ("ops", "ops/kv/x.py", 'k = Kernel("dsv4.ops.moe.router_triton")', "right of kv"),
        ("ops", "ops/kv/x.py", 'k = Kernel(f"dsv4.ops.fused.{name}_triton")', "right of kv"),
        ("ops", "ops/moe/x.py", "from dsv4 import ops", "the table of all ops"),
        ("ops", "ops/moe/x.py", "from dsv4.ops.cpu import moe", "right of moe"),
        ("ops", "ops/moe/x.py", 'import_module("dsv4.ops.cpu.moe")', "right of moe"),
        ("ops", "ops/moe/x.py", 'OP = Op("x", on_cpu="dsv4.ops.cpu.gone")', "right of moe"),
        ("ops", "ops/moe/x.py", 'OP = Op("x", on_cpu="dsv4.ops.fused.block")', "right of moe"),
        ("ops", "ops/x.py", "", "no family"),
        ("triton", "ops/kv/pool.py", "import triton.language as tl", "imports triton"),
        ("triton", "ops/kv/pool.py", "# mypy: ignore-errors", "switches mypy off"),
        ("plain", "model/x.py", "y = FUSED.run(x)", "says .run("),
        ("plain", "model/x.py", "y = norm_store.attempt(a)", "says .attempt("),
        ("plain", "model/x.py", "from dsv4.ops.core.op import Arguments", "says Arguments"),
        ("plain", "model/x.py", "x: dict[str, Any] = {}", "says dict[str, Any]"),
        ("plain", "model/x.py", "from dsv4.ops.core.op import Fusion", "imports Fusion"),
        ("plain", "ops/kv/x.py", "from dsv4.ops.core.op import Fusion, Op", "imports Fusion"),
        ("plain", "ops/kv/x.py", "from dsv4.ops.fused import block", "imports dsv4.ops.fused"),
        (
            "plain",
            "ops/x.py",
            "def f():\n    import dsv4.ops.fused.block",
            "imports dsv4.ops.fused",
        ),
        (
            "plain",
            "engine.py",
            "from dsv4.ops.fused.block import norm_store",
            "imports dsv4.ops.fused",
        ),
        ("exchange", "model/x.py", "self.comm.gather(out, x)", "exchanges with other ranks"),
        ("exchange", "parallel/x.py", "dist.all_reduce(x)", "says all_reduce"),
        ("exchange", "parallel/x.py", "group.allreduce_coalesced(x)", "says allreduce_coalesced"),
        ("exchange", "parallel/x.py", "dist.broadcast_object_list(x)", "broadcast_object_list"),
        ("sizes", "ops/x.py", "\n" * 601, "split it"),
        ("sizes", "ops/x.py", '"""Words."""\n' * 401, "must say why"),
        ("sizes", "ops/x.py", "def f():\n" + "    pass\n" * 59, "f has 60 lines"),
        ("sizes", "ops/x_triton.py", "def f():\n" + "    pass\n" * 149, "f has 150 lines"),
        ("parameters", "ops/x_triton.py", kernel_of(31), "f has 31 parameters"),
        (
            "parameters",
            "ops/x_triton.py",
            kernel_of(30).replace("a29", "*a29, **more"),
            "f has 31 parameters",
        ),
        ("shared", "ops/x.py", "_seen: dict[int, int] = {}", "_seen is shared"),
        ("shared", "ops/x.py", "_seen = threading.local()", "_seen is shared"),
        ("shared", "model/x.py", "KNOWN = set[int]()", "KNOWN is shared"),
        ("shared", "model/x.py", "KNOWN = {}", "KNOWN is shared"),
        ("shared", "model/x.py", "KNOWN = {1: 2}\ndef f(): KNOWN[3] = 4", "KNOWN is shared"),
        ("shared", "model/x.py", "KNOWN = [1]\ndef f(): KNOWN.append(4)", "KNOWN is shared"),
        ("shared", "runner/x.py", "class A:\n    seen: list[int] = []", "seen is shared"),
        ("shared", "runner/x.py", "@lru_cache(maxsize=2)\ndef f(x): ...", "f is shared"),
        ("shared", "runner/x.py", "@functools.cache\ndef f(x): ...", "f is shared"),
        ("shared", "runner/x.py", "f = lru_cache(maxsize=2)(g)", "f is shared"),
    ],
)
def test_the_rules_see_violations(rule: str, path: str, source: str, says: str) -> None:
    found = RULES[rule](PACKAGE / path, source)
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        ("bands", "ops/x.py", "from dsv4.errors import KernelError\nimport torch"),
        ("bands", "config.py", "from dsv4 import errors"),
        ("bands", "cli/x.py", "from dsv4 import __version__"),
        ("triton", "ops/x_triton.py", "# mypy: ignore-errors\nimport triton"),
        ("triton", "ops/gemm/dot_device.py", "import triton"),
        ("ops", "ops/fused/x.py", "from dsv4.ops.sample.sample import sample"),
        ("ops", "ops/moe/x.py", "from dsv4.ops.moe import router\nfrom dsv4.ops.core.op import Op"),
        ("ops", "runner/x.py", "from dsv4.ops import OPS"),
        ("ops", "ops/moe/x.py", 'OP = Op("x", on_cpu="dsv4.ops.cpu.moe")'),
        ("ops", "ops/moe/x.py", 'KERNELS, ON_CPU = (), "dsv4.ops.cpu.moe"'),
        ("plain", "model/x.py", "from dsv4.ops.fused.block import norm_store"),
        ("plain", "runner/x.py", "from dsv4.ops.fused.block import norm_store"),
        ("plain", "ops/fused/x.py", "from dsv4.ops.core.op import Fusion, Kernel"),
        ("exchange", "model/exchange.py", "self.comm.gather(out, x)"),
        ("sizes", "ops/x.py", '"""Long because it is a table."""\n' * 401),
        ("sizes", "ops/x_triton.py", "def f():\n" + "    pass\n" * 100),
        ("parameters", "ops/x_triton.py", kernel_of(30)),
        ("shared", "ops/x.py", "__all__ = ['f']\nKNOWN = {1: 2}\nMANY = [*KNOWN]"),
        ("shared", "ops/x.py", "class A:\n    seen: list[int] = field(default_factory=list)"),
        ("shared", "ops/x.py", "class A:\n    @cached_property\n    def f(self): ..."),
        ("shared", "ops/x.py", "def f():\n    found = []\n    found.append(1)"),
        ("shared", "util/x.py", "_seen = {}"),
    ],
)
def test_the_rules_leave_good_code_alone(rule: str, path: str, source: str) -> None:
    assert RULES[rule](PACKAGE / path, source) == []


def test_folders_stay_small() -> None:
    files = Counter(path.parent for path in modules() if path.name != "__init__.py")
    crowded = [f"{folder.relative_to(ROOT)}: {n}" for folder, n in files.items() if n > MAX_FILES]
    assert not crowded


def test_line_budget(capsys: pytest.CaptureFixture[str]) -> None:
    lines: Counter[str] = Counter()
    found = {name: set((PACKAGE / "ops").glob(name)) for name in OPS_OF_OTHER_ISSUES}
    assert all(found.values()), "a file of OPS_OF_OTHER_ISSUES is gone"
    of_other_issues = set().union(*found.values())
    for path in modules():
        top = path.relative_to(PACKAGE).parts[0]
        if path in of_other_issues:
            top = "ops of other issues"
        lines[top] += len(path.read_text().splitlines())
    with capsys.disabled():
        sys.stdout.write(
            f"\nlines of dsv4: {sum(lines.values())} ("
            + ", ".join(f"{name} {count}" for name, count in sorted(lines.items()))
            + ")\n"
        )
    over = {n: c for n, c in lines.items() if n != "__init__.py" and c > LINE_BUDGET.get(n, 0)}
    assert not over, f"over the budget (0 means none is set): {over}"


BLOCK_TORCH = """
import importlib, importlib.util, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "transformers"):
            raise ImportError(f"{name} is blocked here")
        return None

sys.meta_path.insert(0, Block())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{name}: {error}")
sys.exit("\\n".join(failed) or 0)
"""


def run_without_torch(names: Iterable[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK_TORCH, *names]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def exists(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_modules_that_need_no_torch() -> None:
    result = run_without_torch(name for name in WITHOUT_TORCH if exists(name))
    assert result.returncode == 0, result.stderr


def test_the_torch_block_works() -> None:
    result = run_without_torch(["dsv4.engine"])
    assert result.returncode != 0
    assert "torch is blocked here" in result.stderr


def test_every_planted_bug_has_its_text() -> None:
    """Once in its file; else `scripts/plant_bugs.py` cannot plant it."""
    facts = runpy.run_path(str(ROOT / "scripts" / "plant_bugs.py"))
    bugs = [*facts["BUGS"], *facts["MENDS"]]
    lost = [bug.name for bug in bugs if (ROOT / bug.file).read_text().count(bug.old) != 1]
    assert not lost, f"give them the text that stands there now: {lost}"
