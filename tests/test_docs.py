"""The documents name real files, functions and variables, and the README's example runs."""

import ast
import functools
import io
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from dsv4.cli import main
from dsv4.ops import OPS

ROOT = Path(__file__).parent.parent
DOORS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCS = [*DOORS, *sorted((ROOT / "docs").glob("*.md"))]
OURS = r"(?:dsv4|tests|docs|scripts|benchmarks)/[\w./-]+|(?:README|CHANGELOG|CONTRIBUTING)\.md"


def definitions(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` defined in a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            kinds = ast.FunctionDef | ast.AsyncFunctionDef
            members = [item for item in node.body if isinstance(item, kinds)]
            names |= {f"{node.name}.{item.name}" for item in members}
    return names


def hops(text: str) -> list[tuple[str, str]]:
    """Pairs of a file and a function that stand in neighbouring columns of a table."""
    return re.findall(r"\| `(dsv4/[\w./]+\.py)` \| `([\w.]+)` \|", text)


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    found = set(re.findall(rf"[`(]({OURS})[`)]", document.read_text()))
    missing = sorted(name for name in found if not (ROOT / name).exists())
    assert not missing


def test_the_journeys_hops_exist() -> None:
    pairs = hops((ROOT / "docs" / "journey.md").read_text())
    assert len(pairs) > 25
    missing = [f"{file}: {name}" for file, name in pairs if name not in definitions(ROOT / file)]
    assert not missing
    # the way down passes every part that a token meets
    parts = {Path(file).parts[1].removesuffix(".py") for file, _ in pairs}
    assert {"engine", "scheduler", "runner", "cache", "model", "ops", "sampling", "chat"} <= parts


ROW = re.compile(r"^\| ([A-Z]\d+) \| `(dsv4/[\w./]+)` \| `([\w.]+)` \| (.+?) \| .*\|$", re.M)


@functools.cache
def parsed(file: str) -> tuple[str, ast.Module]:
    text = (ROOT / file).read_text()
    return text, ast.parse(text)


@functools.cache
def source_of(file: str, name: str) -> str:
    """The text of a function or of a class's method."""
    text, tree = parsed(file)
    nodes: list[ast.stmt] = tree.body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next(n for n in nodes if isinstance(n, kinds) and n.name == part)
        nodes = node.body
    return ast.get_source_segment(text, node) or ""


def imports(file: str, module: str, name: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom) and node.module == module
        and name in (alias.name for alias in node.names)
        for node in ast.walk(parsed(file)[1])
    )  # fmt: skip


@functools.cache
def function_counts() -> Counter[str]:
    package = "\n".join(path.read_text() for path in (ROOT / "dsv4").rglob("*.py"))
    return Counter(re.findall(r"^ *(?:async )?def (\w+)\(", package, re.M))


def is_named(quote: str, file: str, name: str) -> bool:
    """Whether a quoted call says which function it calls. A message says its kind, a constructor
    its class; an object that is called need not say its class, and the framework calls routes."""
    owner, _, last = name.rpartition(".")
    if last == "__call__" or quote.startswith('"kind": "'):
        return True
    words = {owner, "cls"} if last == "__init__" else {last}
    nodes = [n for n in parsed(file)[1].body if isinstance(n, ast.AsyncFunctionDef)]
    routes = {n.name for n in nodes if any("router." in ast.unparse(d) for d in n.decorator_list)}
    return bool(words & set(re.findall(r"\w+", quote))) or (name in routes and "_app(" in quote)


def missing_calls(page: str) -> list[str]:
    """Rows whose caller does not call them. Quoted text must stand in the caller and name the
    function; a call into another file must be quoted if its name alone could mean another
    function."""
    rows = {hop: (file, name, by) for hop, file, name, by in ROW.findall(page)}
    defined, wrong = function_counts(), []
    for hop, (file, name, by) in rows.items():
        own = source_of(file, name)
        caller = re.match(r"([A-Z]\d+)(?:: `(.*)`)?$", by)
        if caller is None:
            continue  # a beginning; how many there are is tested
        text, quoted = source_of(*rows[caller[1]][:2]), caller[2]
        last, here = name.split(".")[-1], file == rows[caller[1]][0]
        is_imported = imports(rows[caller[1]][0], file.removesuffix(".py").replace("/", "."), last)
        if not (quoted or here or is_imported) and defined[last] > 1:
            wrong.append(f"{hop}: quote the call; there are {defined[last]} functions {last}")
        if quoted and not is_named(quoted, file, name):
            wrong.append(f"{hop}: `{quoted}` does not name {name}")
        call = rf"\b{last}\(" if not here or "." not in name else rf"\bself\.{last}\("
        found = quoted in text if quoted else re.search(call, text) is not None
        kind = re.search(r'"kind": "(\w+)"', quoted or "")
        if not found or (kind and f'"{kind[1]}"' not in own):
            wrong.append(f"{hop}: {rows[caller[1]][1]} does not call {name}")
    return wrong


def test_every_hop_of_the_journey_calls_the_next() -> None:
    page = (ROOT / "docs" / "journey.md").read_text()
    rows = ROW.findall(page)
    assert len(rows) > 80
    assert sum(not re.match(r"[A-Z]\d", by) for *_, by in rows) == 3, "request, step, weight"
    assert {hop[0] for hop, *_ in rows} == set("RSBW")
    assert missing_calls(page) == []


def test_what_readers_of_nano_vllm_find_exists() -> None:
    page = (ROOT / "docs" / "journey.md").read_text()
    pairs = re.findall(r"((?:`[\w.]+`, )*`[\w.]+`) in `(dsv4/[\w/]+\.py)`", page.split("## ")[0])
    assert len(pairs) > 8
    for names, file in pairs:
        found = definitions(ROOT / file)
        first, *others = re.findall(r"`([\w.]+)`", names)
        owner = first.rpartition(".")[0]  # `Runner.submit`, `sample`: methods of the same class
        missing = {n for n in others if not {n, f"{owner}.{n}"} & found} | ({first} - found)
        assert not missing, file


def test_the_architecture_names_every_part() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in row.split(", ")}
    parts = {path.stem for path in (ROOT / "dsv4").iterdir() if path.suffix == ".py"}
    parts |= {path.parent.name for path in (ROOT / "dsv4").glob("*/__init__.py")}
    assert {name.strip("`") for name in named} == parts - {"__init__", "__main__"}


def test_a_wrong_call_would_be_seen() -> None:
    page = (ROOT / "docs" / "journey.md").read_text()
    moved = page.replace("| `Engine._start` | R13 |", "| `Engine._start` | R12 |")
    assert "R14: Worker._on_message does not call Engine._start" in missing_calls(moved)
    assert missing_calls(page.replace("`model.run_stage(inputs,`", "`model.run_stage(pages,`"))
    assert missing_calls(page.replace('"kind": "outputs"', '"kind": "out"'))
    skipped = page.replace("`RequestLink.send` | R10: `self._link.send(`",
                           "`RequestLink.send` | R9: `self._box.add(`")  # fmt: skip
    assert missing_calls(skipped) == ["R11: `self._box.add(` does not name RequestLink.send"]


def test_the_journey_names_the_ops_of_a_block() -> None:
    text = (ROOT / "docs" / "journey.md").read_text()
    named = {file for file, _ in hops(text)}
    for op in OPS.values():
        home = op.reference.__module__.replace(".", "/") + ".py"
        if op.name in ("embed", "rms_norm", "rope", "sample", "own_experts"):
            continue  # inside the functions that are named, or only on several ranks
        assert home in named, f"{op.name} in {home}"


def test_a_wrong_hop_would_be_seen() -> None:
    [(file, name)] = hops("| 1 | `dsv4/engine.py` | `Engine.fly` | no |")
    assert name not in definitions(ROOT / file)
    assert "Engine.step" in definitions(ROOT / file)


def test_every_variable_is_documented() -> None:
    used: set[str] = set()
    for path in (ROOT / "dsv4").rglob("*.py"):
        used |= set(re.findall(r"[\"'](DSV4_[A-Z_]+)[\"']", path.read_text()))
    documented = set(
        re.findall(r"\| `(DSV4_[A-Z_]+)` \|", (ROOT / "docs/environment.md").read_text())
    )
    assert used == documented
    assert len(documented) <= 10


def test_the_readmes_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    # the others need a server: tests/server/test_tiny.py
    example, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1].endswith("]")


def test_the_generated_parts_are_current() -> None:
    """Hardware table, references and picture follow from code, `plan` and records."""
    script = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))
    stale = [path.name for path, text in script["wanted"]().items() if path.read_text() != text]
    assert not stale, f"{stale} out of date: run python scripts/make_docs.py"


def test_examples_of_commands_are_commands() -> None:
    help_text = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))["help_text"]
    found = help_text(
        "x", "Do it.\n\n    Examples: dsv4 x --one; dsv4 x --two 2,3;\n    dsv4 y\n    "
    )
    assert found == "Do it.\n\nExamples:\n\n    dsv4 x --one\n    dsv4 x --two 2,3\n    dsv4 y"
    for wrong in ("dsv4 x; the other way:\n    dsv4 y", "dsv4 x, or y", "dsv4 x\n    dsv4 y", "x"):
        with pytest.raises(SystemExit, match="is not one `dsv4` command"):
            help_text("x", f"Do it.\n\n    Example: {wrong}")


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines]


def test_the_readmes_commands_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    commands = readme_commands()
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
            continue
        assert words[0] == ".venv/bin/dsv4", f"{command}: cannot be pasted after make demo"
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (0, None), command
    assert "The capital of France is" in capsys.readouterr().out


def test_make_runs_what_the_readme_says() -> None:
    recipe = make_dry_run("demo")
    assert recipe.splitlines()[-1] == ".venv/bin/python scripts/demo.py"  # tests/tools/test_tiny.py
    assert make_dry_run("serve", "PORT=8123").splitlines()[-1] == (
        ".venv/bin/dsv4 serve --port 8123"  # run in tests/server
    )


def make_dry_run(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_hooks_and_workflow_run_what_make_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    lint = make_dry_run("lint").splitlines()
    linters = [line for line in lint if re.match(r"\.venv/bin/(ruff|mypy)", line)]
    assert len(linters) == 3
    for command in linters:
        assert re.search(rf"entry: {re.escape(command)}$", hooks, re.M), command
    assert "repo: local" in hooks
    assert "http" not in hooks, "hooks need no network"
    assert "run: .ci/run" in (ROOT / ".github/workflows/test.yml").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_commands_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = set(re.findall(r"\bmake ([a-z-]+)\b", text))
    assert {"test", "release", "browser"} <= named <= set(targets)
    for command in re.findall(r"^(dsv4 .*?)(?:\s+#.*)?$", text, re.M):
        words = shlex.split(command)
        options = [word for word in words if word.startswith("--")]
        name = " ".join(word for word in words[: 3 if words[1] == "bench" else 2])
        section = (ROOT / "docs" / "commands.md").read_text().split(f"\n## {name}\n")[1]
        for option in options:
            assert f"`{option}`" in section.split("\n## ")[0], command


def test_the_readmes_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [named] = re.findall(r"pip install '\.\[([\w,]+)\]'", (ROOT / "README.md").read_text())
    assert set(named.split(",")) <= set(project["optional-dependencies"])


def anchors(path: Path) -> set[str]:
    """What `#…` may follow a link to this page, spelled as sites spell it."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", path.read_text(), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return found


PAGES = [*DOCS, ROOT / "examples" / "README.md", ROOT / "training" / "README.md"]


@pytest.mark.parametrize("document", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


ODD_WORDS = re.compile(r"\b(whoever|nobody|for ever|himself|herself)\b", re.I)


@pytest.mark.parametrize("document", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_plain_english(document: Path) -> None:
    assert not ODD_WORDS.findall(document.read_text())


def prose(path: Path) -> list[tuple[int, str]]:
    """Docstrings and comments of a file, with their lines."""
    source = path.read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            found += [(getattr(node, "lineno", 1), text)] if text else []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string))
    return found


def test_plain_english_in_docstrings() -> None:
    odd = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / "dsv4").rglob("*.py"))
        for line, text in prose(path)
        for word in ODD_WORDS.findall(text)
    ]
    assert not odd, "say it in plain technical English"


def test_odd_words_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text('"""Whoever reads."""\n\ndef f():\n    """Waits for ever."""\n    # nobody\n')
    found = [word.lower() for _, text in prose(file) for word in ODD_WORDS.findall(text)]
    assert sorted(found) == ["for ever", "nobody", "whoever"]


def test_the_size_of_the_package_is_told() -> None:
    """The comparison's own row; the others' are counted in snapshots."""
    page = (ROOT / "docs" / "compare.md").read_text()
    [told] = re.findall(r"lines of Python \| about ([\d,]+)", page)
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "dsv4").rglob("*.py"))
    assert 0.9 <= int(told.replace(",", "")) / lines <= 1.1, f"{lines} lines"


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_no_word_is_explained_twice() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("| **"):
            words += re.findall(r"\*\*([^*]+)\*\*", line.split("|")[1])
    assert len(words) > 40
    assert len(words) == len(set(words))
