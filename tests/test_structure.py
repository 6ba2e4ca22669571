"""The shape of the package: who may import whom, what runs without torch, how long things are.

Each rule is a function from sources to a list of complaints, so that it can be shown to see a
violation as well as to find none.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
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
# The registry loads variants for CPUs by the name that an op gives them, as it loads kernels.
LOADED_BY_NAME = {("dsv4/ops/core/op.py", "dsv4.ops.cpu")}
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
LINES_IN_FILES_OF_OPS = {  # added minus deleted, by the history since ops had 11,746 lines
    "steps as functions of fixed buffers, cold starts": 198,
    "checkpoints of other tools": 10,
    "ranks": 153,
    "drafts": 15,
    "MXFP4 as stored, experts in host memory": 205,
    "weight streams": 114,
    "other GPUs": 111,
    "few rows on a CPU, any number of threads": 57,
    "official checkpoints on one GPU: FP8 in streams and prompts": 60,
    "FP8 rows as trained": 107,
}

# Lines of each part, with room to grow; more than this is a decision, not an accident.
LINE_BUDGET = {
    "engine.py": 600,
    # 30 for drafts that are made on the device, and their times; 50 for steps ahead of their count
    "pipeline.py": 400,
    "config.py": 400,  # options of ranks and nodes, of drafts
    "request.py": 420,
    "errors.py": 80,
    "testing.py": 300,
    "util": 790,  # most of it config.json in three spellings, and its mistakes; 55: rates of GPUs
    "formats": 1500,
    "parallel": 1600,  # 300 for other nodes: keys, joining, torchrun
    # Its own lines, and what other issues added to its files; their own files are counted apart
    "ops": OWN_OPS_LINES + sum(LINES_IN_FILES_OF_OPS.values()),
    # 170 for experts split over ranks, their count, an echo; 320 for fusions of few rows on a CPU
    # 360 for streams of FP8 and bf16, and of experts by a table; FP8 as bf16 in prompts
    # 730 for FP8 products on sm_90, 610 for those of prompts
    "ops of other issues": 5230,
    "cache": 1500,
    "checkpoint": 3000,
    "chat": 4500,
    "sampling": 700,
    "model": 1600,
    # 160 for homes: where a sequence runs, what a home has room for; 60 for drafts made on demand
    "scheduler": 1220,
    # 300 for ranks: starting them, following commands; 550 for layouts: their forecast, the choice;
    # 150 for where ranks meet;
    # 830 for drafts
    # 840 for experts in host memory: what fits, moving them in pieces, which ones stay, and a
    # warm-up that takes the memory of the largest step
    # 100 for DSpark, 130 for cards, what they cannot do and were measured to do, their buses
    # 220 for attention by sequences: lines, state and copies of several homes, their forecast
    # 40 for what a rank computes besides its share, as measured
    "runner": 5580,  # 120 for ranks on GPUs, 90 for several steps in flight, 30 for split experts
    "server": 4900,  # three protocols with the fields that clients of other servers send
    # 550 lines for traffic at an engine and at a server, its figures and its picture
    # 450 for experts in host memory: their bench and plan
    # 90 for reports of any card: nothing private, an end
    # 640 for reports of every case: compiling ahead, worker processes, fused steps
    # 25 for converting to the official formats
    "tools": 10170,  # 405 for layouts over several GPUs and slices, 200 for the doctor of ranks
    "cli": 2700,  # 200 for plans over several GPUs and join
    "deploy": 1000,
    "__main__.py": 10,
}


# Files of `ops` that came with other issues than its own order (24): ranks on GPUs, drafts, steps
# that are told everything by one line of integers, pipeline stages, experts in host memory,
# forms of references for few rows on a CPU, streams of weights on Hopper.
OPS_OF_OTHER_ISSUES = (
    "comm/*.py",
    "core/gpu.py",
    "cpu/*.py",
    "gemm/a8/*.py",
    "gemm/variants/stream_gluon.py",
    "gemm/variants/stream_stored_gluon.py",
    "gemm/weights/expand_fp8_triton.py",
    "gemm/weights/a8.py",
    "kv/begin_step*.py",
    "mhc/stage_end_triton.py",
    "moe/experts_a8_triton.py",
    "moe/experts_stream_gluon.py",
    "moe/placed.py",
    "sample/accept*.py",
    "sample/draft_rows*.py",
    "sample/verify*.py",
)


DOTTED_NAME = r"dsv4(\.\w+)+\.?"  # ends with a dot where a {name} follows


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """`dsv4/ops/kv/pool.py` belongs to `ops`, `dsv4/engine.py` to `engine`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST, path: Path, within: str = "dsv4") -> Iterable[str]:
    """Full names of everything imported anywhere in a file, relative imports resolved; modules
    imported from the package `within` by name. Modules named by a text count, too: `Kernel(...)`,
    `import_module(...)`."""
    package = ["dsv4", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module == within:  # `from dsv4 import errors`
                yield from (f"{within}.{alias.name}" for alias in node.names)
            else:
                yield module
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
    for name in imported(ast.parse(source), path):
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


def ops_complaints(path: Path, source: str) -> list[str]:
    """Families of ops import only those to their left in OPS_ORDER."""
    ops = PACKAGE / "ops"
    if not path.is_relative_to(ops) or path == ops / "__init__.py":
        return []
    where, family = path.relative_to(ROOT), path.relative_to(ops).parts[0]
    if family not in OPS_ORDER:
        return [f"{where}: {family!r} is no family of ops"]
    complaints = []
    for name in imported(ast.parse(source), path, within="dsv4.ops"):
        target = name.split(".")[2] if name.startswith("dsv4.ops.") else None
        if (str(where), name) in LOADED_BY_NAME:
            continue
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
    names = {name.split(".")[0] for name in imported(ast.parse(source), path)}
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
    for node in ast.walk(ast.parse(source)):
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
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        is_kernel = any("jit" in ast.unparse(mark) for mark in node.decorator_list)
        count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
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
    for node in ast.walk(ast.parse(source)):
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
    tree = ast.parse(source)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = {
        name
        for name in names
        if any(name.startswith(word) for word in REDUCING) or name in REDUCING
    }
    complaints = [f"{where} says {name}" for name in sorted(found)]
    knows = part_of(path) in MAY_EXCHANGE or path == PACKAGE / "model" / "exchange.py"
    calls = {"gather", "exchange"} & {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "comm"
    }
    if calls and not knows:
        complaints.append(f"{where} exchanges with other ranks")
    return complaints


RULES = {
    "bands": band_complaints,
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
    "dsv4/tools/doctor/plain/sampling.py": ("dsv4.request",),
    "dsv4/tools/doctor/plain/weights.py": ("dsv4.checkpoint",),  # where the bytes are, not values
    "tests/ops/test_formulas.py": ("dsv4.ops", "dsv4.formats.entry"),  # under test; no dsv4.tools
    "tests/checkpoint/bits.py": (),
    "tests/checkpoint/writers.py": ("dsv4.checkpoint.names", "dsv4.config"),
}


@pytest.mark.parametrize("path", INDEPENDENT)
def test_what_checks_shares_no_code_with_what_it_checks(path: str) -> None:
    found = imported(ast.parse((ROOT / path).read_text()), PACKAGE / "x.py")
    shared = [name for name in found if name.split(".")[0] in ("dsv4", "training")]
    assert [name for name in shared if not name.startswith(INDEPENDENT[path])] == []


def double_names(sources: dict[str, str]) -> list[str]:
    """Classes that are defined in more than one file."""
    homes: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]


def test_a_class_name_has_one_home() -> None:
    assert double_names({"a": "class Step: ...", "b": "class Step: ..."}) == ["Step: a, b"]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    assert double_names(sources) == []


# Names that said too little, or one name for several things.
GIVEN_UP = {
    *("Parts", "Forms", "form_of", "FORM", "ATTEND", "CHOOSE", "Order", "chat_order", "Work"),
    *("Running", "Copies", "Loaded", "Draw", "_held", "_heard", "unheard", "parting", "_tell_of"),
    *("_give_up", "_is_coming", "num_held", "rooms"),
}


def given_up_names(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
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
    ("dsv4.scheduler.sequence", "dsv4.scheduler.drafts"),
    ("dsv4.server.worker.mailbox", "dsv4.server.worker.link"),
}


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Modules by name -> those they import anywhere, functions and TYPE_CHECKING included."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        found = graph.setdefault(name, set())
        for node in ast.walk(ast.parse(source)):
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


@pytest.mark.parametrize("rule", RULES)
def test_every_module_keeps_the_rules(rule: str) -> None:
    found = [c for path in modules() for c in RULES[rule](path, path.read_text())]
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
        ("plain", "model/x.py", "from dsv4.ops.fused.block import norm_store"),
        ("plain", "runner/x.py", "from dsv4.ops.fused.block import norm_store"),
        ("plain", "ops/fused/x.py", "from dsv4.ops.core.op import Fusion, Kernel"),
        ("exchange", "model/exchange.py", "self.comm.gather(out, x)"),
        ("sizes", "ops/x.py", '"""Long because it is a table."""\n' * 401),
        ("sizes", "ops/x_triton.py", "def f():\n" + "    pass\n" * 100),
        ("parameters", "ops/x_triton.py", kernel_of(30)),
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
