"""Write everything generated: hardware table, references, picture, and the measured times of ops.

    python scripts/make_docs.py          write them
    python scripts/make_docs.py --check  say which are out of date; exit code 1 if any is

Figures come from `dsv4.tools.plan` and from the records in `benchmarks/records`, nothing else, so
they cannot promise what was not planned or measured.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from dsv4 import Engine, EngineConfig, ModelConfig, SamplingParams, errors, request
from dsv4.chat.fields import MAX_TEXT_CHARS
from dsv4.cli import app
from dsv4.ops.core.gpu import KNOWN
from dsv4.request import Completion, Guide, Output, Request, Stats, TokenLogprobs
from dsv4.runner.ranks.cluster import GPUS as CARDS
from dsv4.runner.ranks.cluster import Cluster
from dsv4.sampling import guide_compiler
from dsv4.server import options, schemas
from dsv4.server.worker import link, mailbox
from dsv4.tools.plan import PlannedModel, make_plan, planned_model
from dsv4.tools.predict import MEASURED
from dsv4.tools.speed.layouts import MEASURED as MEASURED_LAYOUTS
from dsv4.tools.speed.layouts import LayoutPlan, layout_options, plan_layouts
from dsv4.tools.speed.report import Curves, position_picture, share_picture
from dsv4.tools.speed.steps import StepResult

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
COMPARE = "2026-11-17_h200_compare.jsonl"
MEMORY = "2026-11-17_h200_memory.jsonl"
HOST_EXPERTS = "2026-11-18_h200_experts_host.jsonl"
SHARES = "2026-11-18_h200_experts_share.jsonl"  # with fewer experts on the GPU
PROMPTS = "2026-11-19_h200_prefill_long.jsonl"
COMPILED = max(path.name for path in RECORDS.glob("*_kernels_compiled.jsonl"))
TINY = max(path.name for path in RECORDS.glob("*_tiny_cpu_speed.jsonl"))

# GPU, name for `plan --gpu`, GPU counts
GPUS = (
    ("H200", "h200", (1, 2, 4, 8)),
    ("B200", "b200", (1, 2, 4, 8)),
    ("RTX PRO 6000", "rtx-pro-6000", (1, 2, 4, 8)),
    ("DGX Spark", "spark", (1, 2, 4)),
    ("A100 80 GB", "a100", (1, 2, 4, 8)),
)


def results(name: str) -> list[Any]:
    lines = [json.loads(line) for line in (RECORDS / name).read_text().splitlines()]
    return [line.get("result", line) for line in lines]


def newest(what: str, **wanted: object) -> tuple[str, Any]:
    """The newest H200 record with such a result, and the result."""
    for path in sorted(RECORDS.glob(f"*_h200_{what}*.jsonl"), reverse=True):
        for result in results(path.name):
            if {"what": what, "shape": "flash", "batch": 1, **wanted}.items() <= result.items():
                return path.name, result
    raise SystemExit(f"no record of {what} with {wanted}")


def decode_result() -> tuple[str, Any]:
    return newest("decode", context=4096, layers=36)


def record_path(name: str) -> str:
    return f"benchmarks/records/{name}"


# --- the hardware table ---------------------------------------------------------------------------


def cluster_of(gpu: str, count: int, nodes: int = 1) -> Cluster:
    """A DGX Spark is a machine with one GPU."""
    return Cluster.of(gpu, count, count if gpu == "spark" else nodes)


@cache
def official(model: str) -> PlannedModel:
    return planned_model(model, "official")


@cache
def layouts_of(model: str, cluster: Cluster) -> LayoutPlan:
    return plan_layouts(official(model), cluster)


def several(model: str, count: int, gpu: str) -> str:
    """What `plan` recommends when all weights are on GPUs."""
    cluster = cluster_of(gpu, count)
    plan = layouts_of(model, cluster)
    if plan.recommended is None:
        most = min(max(s.weight_bytes for s in f.stages) for f in plan.forecasts)
        return f"no: {most / 1e9:,.0f} GB of weights a GPU"
    best = next(f for f in plan.forecasts if (f.tp, f.pp) == plan.recommended)
    options = layout_options(best.tp, best.pp, cluster)
    text = f"predicted: {1000 / best.steps[1].total:,.0f} tokens/s"
    return f"{text}, `{options}`" if options else text


def one(model: str, gpu: str) -> str:
    subject = official(model)
    plan = make_plan(subject, int(CARDS[gpu].memory_gb * 1e9), gpu=gpu)
    if not plan.possible:
        return f"no: {sum(subject.groups.values()) / 1e9:,.0f} GB of weights"
    if plan.experts is None:
        return several(model, 1, gpu)
    e = plan.experts
    slow, fast = (1000 / ms[1] for ms in e.step_ms.values())
    state = "predicted: "
    if (model, gpu) == ("flash", "h200"):
        slow, fast = sorted(measured_host_experts())
        state = f"**runs**, random weights: [measured]({record_path(HOST_EXPERTS)}) "
    host_gb = f"{e.host_bytes / 1e9:,.0f} GB of experts in host memory"
    return f"{state}{slow:.0f} to {fast:.0f} tokens/s; {host_gb}"


def measured_host_experts() -> Iterator[float]:
    """Tokens/s with all Flash layers, for even and for skewed use of experts."""
    for result in results(HOST_EXPERTS):
        if result.get("what") == "decode" and (result["layers"], result["batch"]) == (43, 1):
            yield result["tokens_per_s"]


def hardware_table() -> str:
    rows = []
    for name, gpu, counts in GPUS:
        for n in counts:
            cells = (
                one(model, gpu) if n == 1 else several(model, n, gpu)
                for model in ("flash", "pro")
            )  # fmt: skip
            rows.append(f"| {n} x {name} | {' | '.join(cells)} |")
    first = results(TINY)[0]
    rate, cores = first["tokens_per_s"]["median"], first["cores"]
    tiny = f"the embedded model `tiny`: [measured]({record_path(TINY)}) {rate:.0f} tokens/s"
    rows.append(f"| laptop, any CPU | no; **runs** {tiny} on {cores} cores | no |")
    return "| hardware | V4-Flash | V4-Pro |\n|---|---|---|\n" + "\n".join(rows)


# --- layouts over several GPUs --------------------------------------------------------------------

LAYOUTS = (  # model, GPU, GPUs, nodes
    ("flash", "h200", 2, 1), ("flash", "h200", 4, 1), ("flash", "h200", 8, 1),
    ("pro", "h200", 8, 1), ("pro", "h100", 16, 2),
    ("flash", "b200", 2, 1), ("flash", "b200", 4, 1), ("flash", "b200", 8, 1),
    ("pro", "b200", 8, 1),
    ("flash", "rtx-pro-6000", 2, 1), ("flash", "rtx-pro-6000", 4, 1),
    ("flash", "rtx-pro-6000", 8, 1), ("pro", "rtx-pro-6000", 16, 2),
    ("flash", "spark", 2, 2), ("flash", "spark", 4, 4), ("pro", "spark", 16, 16),
)  # fmt: skip


def layout_table() -> str:
    rows = []
    for model, gpu, count, nodes in LAYOUTS:
        cluster = cluster_of(gpu, count, nodes)
        plan = layouts_of(model, cluster)
        first = f"{count} {cluster.gpu.name}" + (f", {nodes} nodes" if nodes > 1 else "")
        name = f"{first} | {model.capitalize()}"
        found = [f for f in plan.forecasts if (f.tp, f.pp) == plan.recommended]
        if not found:
            rows.append(f"| {name} | does not fit | | | | | |")
            continue
        [best] = found
        options = f"`{layout_options(best.tp, best.pp, cluster)}`"
        held = max(stage.weight_bytes for stage in best.stages) / 1e9
        by = {"symmetric": "stores", "nccl": "NCCL"}[cluster.comm(best.world)]
        few, many = (f"{best.steps[batch].total:.3g} ms" for batch in (1, 32))
        rows.append(
            f"| {name} | {options} | {by} | {held:.1f} GB | "
            f"{best.kv_tokens / 1e6:.2g} M | {few} | {many} | {best.prompt_ms / 1e3:.2f} s |"
        )
    head = "| GPUs | model | layout | exchange | weights per GPU | capacity, tokens | batch 1 | "
    head += "batch 32 | 8k prompt |\n"
    return head + "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows)


# --- every card -----------------------------------------------------------------------------------


def rate(model: str, gpu: str, count: int) -> str:
    """Tokens/s of one user, predicted by `plan` or measured (bold); after `+`, the GB of experts
    in host memory."""
    subject = official(model)
    if count > 1:
        plan = layouts_of(model, cluster_of(gpu, count))
        best = next((f for f in plan.forecasts if (f.tp, f.pp) == plan.recommended), None)
        return f"{1000 / best.steps[1].total:.0f}" if best else "-"
    one_gpu = make_plan(subject, int(CARDS[gpu].memory_gb * 1e9), gpu=gpu)
    if one_gpu.experts is None:
        whole = layouts_of(model, Cluster.of(gpu, 1)).forecasts[0]
        return f"{1000 / whole.steps[1].total:.0f}" if one_gpu.possible else "-"
    speeds = [f"{1000 / ms[1]:.0f}" for ms in one_gpu.experts.step_ms.values()]
    if (model, gpu) == ("flash", "h200"):
        speeds = [f"**{speed:.0f}**" for speed in sorted(measured_host_experts())]
    return f"{' to '.join(dict.fromkeys(speeds))} +{one_gpu.experts.host_bytes / 1e9:.0f}"


def card_table() -> str:
    """By card: tokens/s, and the evidence for them."""
    compiled = {row["architecture"] for row in compiled_rows()}
    rows = []
    for gpu, card in CARDS.items():
        proof = "compiled, interpreted" if card.architecture in compiled else "interpreted"
        if card.architecture == 90:
            proof = "**run**" if gpu == "h200" else "compiled; an H200 runs this code"
        cells = [rate("flash", gpu, n) for n in (1, 2, 4, 8)] + [rate("pro", gpu, 8)]
        first = f"{card.name} | sm_{card.architecture} | {card.memory_gb:.0f}"
        rows.append(f"| {first} | {' | '.join(cells)} | {proof} |")
    head = "| card | | GB | Flash on 1 | on 2 | on 4 | on 8 | Pro on 8 | proven by |\n"
    return head + "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows)


def compiled_rows() -> list[Any]:
    return results(COMPILED)[1:]


def compiled_table() -> str:
    facts, rows = results(COMPILED)[0]["compiled"], []
    for architecture in sorted({row["architecture"] for row in compiled_rows()}):
        own = [row for row in compiled_rows() if row["architecture"] == architecture]
        kernels = {(row.get("module"), row["kernel"]) for row in own}
        most = {name: max(row[name] for row in own) for name in ("registers", "shared")}
        limit = KNOWN[architecture].shared_per_block
        outside = {row["kernel"] for row in own if row["spills"]}
        hot = sum(row["hot_reloads"] for row in own)
        rows.append(
            f"| sm_{architecture} | {len(kernels)} | {len(own)} | {most['registers']} | "
            f"{most['shared'] >> 10} of {limit >> 10} | {hot} | {len(outside)} |"
        )
    return (
        f"Compiled with Triton {facts['triton']} on {facts['date']}, kernels of commit "
        f"{facts['tree']} ([record](../{record_path(COMPILED)})).\n\n"
        "| | kernels | configurations | most registers | most shared memory, KB | reloads in loops "
        "with products | kernels that spill elsewhere |\n|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\nThe reloads of sm_90 are those of 64 heads and of index keys with Triton 3.9; with "
        "3.6, which an H200 ran, attention of prompts has none ([state kernels](state-kernels.md))."
    )


def expected_speed() -> str:
    decode, step = decode_result()
    prefill, prompt = newest("prefill", context=8192, weights="nvfp4")
    slow, fast = sorted(measured_host_experts())
    return (
        f"- {step['layers']} of {step['full_layers']} layers take {step['ms']:.2f} ms a token at "
        f"4,096 tokens of context ([record](../{record_path(decode)})): {step['full_ms']:.1f} ms, "
        f"{step['tokens_per_s']:.0f} tokens/s, when scaled to all layers.\n"
        f"- A prompt of 8,192 tokens takes {prompt['full_ms'] / 1000:.2f} s, scaled from "
        f"{prompt['layers']} layers ([record](../{record_path(prefill)})).\n"
        f"- All layers, with 11 % of the experts in host memory: {slow:.0f} to {fast:.0f} tokens/s "
        f"at 16,384 tokens of context ([record](../{record_path(HOST_EXPERTS)}))."
    )


def proof() -> str:
    decode, step = decode_result()
    ours, theirs = results(COMPARE)[1:3]
    memory = results(MEMORY)[1]
    planned = memory["planned_bytes"]
    return "\n".join(
        [
            f"- **Fast:** four V4-Flash layers take {ours['ms']:.2f} ms a token on an H200, "
            f"{theirs['times']:.0f} times less than in transformers "
            f"([record](benchmarks/records/{COMPARE})); {step['layers']} layers take "
            f"{step['ms']:.2f} ms, {step['ratio']:.1f} times what reading their bytes takes "
            f"([record]({record_path(decode)})).",
            "- **Exact:** logits equal those of transformers within 2e-4 in fp32, and a request "
            "has the same bits alone and in any batch ([tests](tests/oracle), "
            "[numerics](docs/numerics.md)).",
            f"- **Planned:** {memory['layers']} V4-Flash layers used "
            f"{memory['used_bytes'] / 1e9:.1f} GB of an H200, planned were "
            f"{planned / 1e9:.1f} GB ([record](benchmarks/records/{MEMORY})).",
        ]
    )


def picture() -> str:
    """Milliseconds a token of four Flash layers: transformers, dsv4, the floor."""
    ours, theirs = results(COMPARE)[1:3]
    bars = (
        ("transformers", theirs["ms"], "#9aa3ae"),
        ("dsv4", ours["ms"], "#2f57c8"),
        ("floor: bytes / bandwidth", ours["floor_ms"], "#1c7c54"),
    )
    width, parts = 520 / theirs["ms"], []
    for at, (name, ms, color) in enumerate(bars):
        y = 34 + 30 * at
        parts.append(f'<text x="172" y="{y + 14}" text-anchor="end">{name}</text>')
        size = max(ms * width, 2)
        parts.append(f'<rect x="180" y="{y}" width="{size:.1f}" height="20" fill="{color}"/>')
        parts.append(f'<text x="{188 + size:.1f}" y="{y + 14}">{ms:.2f} ms</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="780" height="130" viewBox="0 0 780 130" '
        'font-family="system-ui, sans-serif" font-size="13">\n'
        '<rect width="780" height="130" rx="8" fill="#ffffff"/>\n<g fill="#1a1d21">\n'
        '<text x="16" y="20" font-weight="600">One token through four V4-Flash layers, one H200, '
        "4,096 tokens of context</text>\n" + "\n".join(parts) + "\n</g>\n</svg>\n"
    )


def shares_picture() -> str:
    """All layers with some experts on the GPU; with all of them fewer layers fit, scaled."""
    found: Curves = {}
    whole = 0.0
    for row in results(HOST_EXPERTS) + results(SHARES):
        if row.get("what") == "decode" and row["batch"] == 1:
            if row["resident_share"] == 1:
                whole = row["ms"] * 43 / row["layers"]
            else:
                found.setdefault(row["routing"], []).append((row["resident_share"], row["ms"]))
    return share_picture({routing: [*points, (1.0, whole)] for routing, points in found.items()})


def prompts_picture() -> str:
    """Chunks of a long prompt."""
    rows = [row for row in results(PROMPTS) if row.get("weights") == "a8"]
    rows = [row for row in rows if row["what"] == "prefill" and row["context"] == 8192]
    return position_picture([StepResult(**row) for row in rows])


# --- references -----------------------------------------------------------------------------------

GENERATED = "<!-- generated by scripts/make_docs.py -->\n\n"


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, item in group.commands.items():
        full = f"{name} {key}"
        if hasattr(item, "commands"):
            yield from commands(item, full)
        else:
            yield full, item


def option_row(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    default = param.default() if callable(param.default) else param.default
    is_plain = default in (None, False, "", [], ()) or param.required
    shown = "required" if param.required else "" if is_plain else f"`{default}`"
    text = (getattr(param, "help", "") or "").replace("|", "\\|").rstrip(".")
    return f"| {names} | {text} | {shown} |"


def help_text(name: str, text: str) -> str:
    """A command's help; examples, which `; ` separates, are lines of their own."""
    text = re.sub(r"^(Examples?): ", r"\1:\n\n    ", inspect.cleandoc(text), flags=re.M)
    text = re.sub(r";\s+dsv4 ", "\n    dsv4 ", text)
    for block in re.findall(r"^Examples?:\n\n(.*?)(?=\n\n|\Z)", text, re.M | re.S):
        for line in block.splitlines():
            if not re.fullmatch(r"    dsv4 ((?![,;:]( |$)).)+", line):
                raise SystemExit(f"{name}: the example {line.strip()!r} is not one `dsv4` command")
    return text


def command_page() -> str:
    parts = [
        f"# Commands\n\n{GENERATED}`dsv4 --help` lists the commands, `dsv4 COMMAND --help` the "
        "options of one; `python -m dsv4` is the same. `dsv4 --install-completion` completes names "
        "in your shell. After `make demo` the command is `.venv/bin/dsv4`.\n"
    ]
    engine = {f"--{item.name.replace('_', '-')}" for item in fields(EngineConfig)}
    shared: dict[str, str] = {}
    for name, command in commands(typer.main.get_command(app), "dsv4"):
        own, taken = [], []
        for param in command.params:
            row = option_row(param)
            is_flag = getattr(param, "is_flag", False) and not param.secondary_opts
            if param.opts[0].split("/")[0] in engine and not is_flag:  # `doctor --ops` is a flag
                shared.setdefault(param.opts[0], row)
                taken.append(f"`{param.opts[0]}`")
            else:
                own.append(row)
        parts.append(f"## {name}\n\n{help_text(name, command.help or '')}\n")
        parts.append("| option | | default |\n|---|---|---|\n" + "\n".join(own) + "\n")
        if taken:
            is_all = len(taken) >= len(engine) - 1  # `doctor` has `--ops` of its own
            which = "the" if is_all else f"{', '.join(taken)} of the"
            parts.append(f"Also {which} [engine options](#engine-options).\n")
    parts.append("## Engine options\n\nFields of `EngineConfig`, the same in Python.\n")
    parts.append("| option | | default |\n|---|---|---|\n" + "\n".join(shared.values()) + "\n")
    return "\n".join(parts)


def field_rows(cls: type) -> str:
    """The fields of a dataclass; their comments stand beside them in the source."""
    source = inspect.getsource(cls)
    rows = []
    for item in fields(cls):  # type: ignore[arg-type]
        found = re.search(
            rf"^    {item.name}: ([^=#\n]+?)(?: = [^#\n]*)?(?:  # (.*))?$", source, re.M
        )
        kind = found[1].strip() if found else str(item.type)
        if get_origin(item.type) is Literal:  # under a name of its own in the source
            kind = f"Literal[{', '.join(map(json.dumps, get_args(item.type)))}]"
        note = item.metadata.get("help") or (found[2] if found else "") or ""
        has_default = item.default is not MISSING
        default = f"`{item.default!r}`" if has_default else ""
        kind = kind.replace("|", "\\|")
        rows.append(
            f"| `{item.name}` | `{kind}` | {default} | {note.replace('|', chr(92) + '|')} |"
        )
    return "| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def signature(name: str, function: Any) -> str:
    text = re.sub(r"(?<!= )'([\w.\[\]| ]+)'", r"\1", str(inspect.signature(function)))
    text = re.sub(
        r"\b(?:dsv4|collections|pathlib|torch)\.[\w.]*?(\w+)(?=[\[\],)| ]|$)", r"\1", text
    )
    text = re.sub(
        r"\*<class [\w.]*?(\w+)>|(?:typing\.)?Unpack\[[\w.]*?(\w+)\]", r"Unpack[\1\2]", text
    )
    return name + text.replace("(self, ", "(").replace("(self)", "()")


def python_page() -> str:
    parts = [
        f"# Python API\n\n{GENERATED}Everything here, and every error (`dsv4/errors.py`), is in "
        "`dsv4`: `from dsv4 import Engine, SamplingParams`. The package is typed (`py.typed`), so "
        "editors and mypy know these names. Runnable files: "
        "[`examples/`](../examples/README.md).\n",
        "## Engine\n\n" + inspect.cleandoc(Engine.__doc__ or "") + "\n",
    ]
    for name, member in vars(Engine).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        if name.startswith("_") or not (
            inspect.isfunction(function) or isinstance(member, property)
        ):
            continue
        if isinstance(member, property):
            head, text = name, member.fget.__doc__
        else:
            bound = Engine.load if name == "load" else function
            head, text = signature(name, bound), function.__doc__
        parts.append(
            f"### `Engine.{name}`\n\n```python\n{head}\n```\n\n{inspect.cleandoc(text or '')}\n"
        )
    shown = (SamplingParams, Guide, EngineConfig, Request, Output, Completion, TokenLogprobs, Stats)
    for cls in shown:
        assert is_dataclass(cls)
        parts.append(f"## {cls.__name__}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
        parts.append(field_rows(cls))
    text = inspect.cleandoc(ModelConfig.__doc__ or "")
    parts.append(f"## ModelConfig\n\n{text} `Engine.config` holds the model's.\n")
    parts.append(f"## Errors\n\n```text\n{inspect.cleandoc(errors.__doc__ or '')}\n```\n")
    return "\n".join(parts)


# --- measured times of ops, and names of records, which the package carries -----------------------


def measured_ops(folder: Path = RECORDS) -> str:
    """The newest H200 median for each op, shape and token count in the records."""
    times, newest = {}, "no record"
    for path in sorted(folder.glob("*_h200_*.jsonl")):
        for line in path.read_text().splitlines():
            row: dict[str, Any] = json.loads(line).get("result", {})
            if "median_us" in row:
                times[row["op"], row["shape"], row["tokens"]] = float(row["median_us"])
                newest = path.name
    rows = ",\n".join(f"  {json.dumps([*key, us])}" for key, us in sorted(times.items()))
    return f'{{\n "record": {json.dumps(newest)},\n "median_us": [\n{rows}\n ]\n}}\n'


def measured_layouts(folder: Path = RECORDS) -> str:
    """The newest record of a step for each model, GPU, tp, pp and attention."""
    found = {}
    for path in sorted(folder.glob("*_*_*.jsonl")):
        gpu = path.name.split("_")[1]
        for line in path.read_text(encoding="utf-8").splitlines():
            row: dict[str, Any] = json.loads(line).get("result", {})
            if row.get("what") in ("decode", "parallel") and row.get("shape"):
                ranks = row.get("tp", 1), row.get("pp", 1), row.get("attention", "tp")
                part = " (fewer layers)" if "full_layers" in row else ""
                found[row["shape"], gpu, *ranks] = path.name + part
    rows = ",\n".join(f" {json.dumps([*key, name])}" for key, name in sorted(found.items()))
    return f"[\n{rows}\n]\n" if rows else "[]\n"


# --- writing --------------------------------------------------------------------------------------


def between(text: str, name: str, body: str) -> str:
    """Replace the text between the markers of a part."""
    begin, end = f"<!-- {name}: generated by scripts/make_docs.py -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected one {begin!r} and one {end!r}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n\n{body}\n\n{end}{rest.split(end)[1]}"


# --- the server's limits --------------------------------------------------------------------------


def limits_table() -> str:
    mega = 1 << 20
    rows: list[tuple[str, int | float, str]] = [
        ("headers of a request", options.MAX_HEADER_BYTES >> 10, "KiB"),
        ("time for headers", options.HEADER_SECONDS, "s"),
        ("body", options.MAX_BODY_BYTES // mega, "MiB"),
        ("time for a body", options.BODY_SECONDS, "s"),
        ("large bodies in work, together", options.MAX_BODIES_BYTES // mega, "MiB"),
        ("keys, strings, lists and objects of a body", options.MAX_JSON_VALUES, ""),
        ("numbers in lists of a body", options.MAX_JSON_NUMBERS, ""),
        ("nesting of a body", options.MAX_JSON_DEPTH, "levels"),
        ("fields of a body", schemas.MAX_FIELDS, ""),
        *((f"`{name}`", most, "entries") for name, most in schemas.SIZES.items()),
        ("every other list or object of a body", schemas.MAX_ENTRIES, "entries"),
        ("prompts in `/v1/completions`", schemas.MAX_PROMPTS, ""),
        ("choices (`n`)", schemas.MAX_CHOICES, ""),
        ("text, and all text of a conversation", MAX_TEXT_CHARS, "characters"),
        ("log-probabilities of one whole answer", options.MAX_LOGPROBS, ""),
        ("log-probabilities of all whole answers", options.MAX_ALL_LOGPROBS, ""),
        ("JSON schema or grammar", request.MAX_GUIDE_CHARACTERS, "characters"),
        ("regular expression", request.MAX_REGEX_CHARACTERS, "characters"),
        ("its character classes, its repetitions", request.MAX_REGEX_PARTS, "each"),
        ("its counted repetitions", request.MAX_REGEX_REPEAT, ""),
        ("guides that wait to be compiled", guide_compiler.MAX_PENDING, ""),
        ("time to compile a guide", guide_compiler.COMPILE_SECONDS, "s"),
        ("prompt tokens that run or wait", link.MAX_TOKENS, ""),
        ("outputs a client leaves unread", mailbox.MAX_UNREAD, ""),
        ("time a client reads nothing", options.WRITE_SECONDS, "s"),
        ("requests that wait (`--max-waiting`)", options.ServerOptions.max_waiting, ""),
        ("engine without progress (`--step-timeout`)", EngineConfig.step_timeout, "s"),
        ("engine silent while it loads", link.SILENT_SECONDS, "s"),
    ]
    lines = [f"| {name} | {value:,.10g} {unit}".rstrip() + " |" for name, value, unit in rows]
    return "| what | at most |\n|---|---|\n" + "\n".join(lines)


def wanted() -> dict[Path, str]:
    serving, running = ROOT / "docs" / "serving.md", ROOT / "docs" / "run-flash-pro.md"
    cards, ranks = ROOT / "docs" / "hardware.md", ROOT / "docs" / "parallel.md"
    readme = (ROOT / "README.md").read_text()
    readme = between(readme, "proof", proof())
    readme = between(readme, "hardware", hardware_table())
    return {
        ROOT / "README.md": readme,
        cards: between(
            between(cards.read_text(), "cards", card_table()), "compiled", compiled_table()
        ),
        ranks: between(ranks.read_text(), "layouts", layout_table()),
        serving: between(serving.read_text(), "limits", limits_table()),
        running: between(running.read_text(), "speed", expected_speed()),
        ROOT / "docs" / "commands.md": command_page(),
        ROOT / "docs" / "python-api.md": python_page(),
        ROOT / "docs" / "pictures" / "one_token_h200.svg": picture(),
        ROOT / "docs" / "pictures" / "experts_share_h200.svg": shares_picture(),
        ROOT / "docs" / "pictures" / "long_prompts_h200.svg": prompts_picture(),
        MEASURED: measured_ops(),
        MEASURED_LAYOUTS: measured_layouts(),
    }


def main() -> None:
    texts = wanted()
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    for path, text in texts.items():
        if path in stale and "--check" not in sys.argv:
            path.write_text(text)
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if "--check" in sys.argv and stale:
        raise SystemExit(f"out of date: {names}; run python scripts/make_docs.py")
    sys.stdout.write(f"written: {names}\n" if stale else "everything is current\n")


if __name__ == "__main__":
    main()
