"""The documents name real files, functions and variables, and the README's example runs."""

import ast
import re
from pathlib import Path

import pytest

from dsv4.ops import OPS

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = r"(?:dsv4|tests|docs|scripts|benchmarks)/[\w./-]+|README\.md|CHANGELOG\.md"


def definitions(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` defined in a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [item for item in node.body if isinstance(item, ast.FunctionDef)]
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


def test_the_journey_names_the_ops_of_a_block() -> None:
    text = (ROOT / "docs" / "journey.md").read_text()
    named = {file for file, _ in hops(text)}
    for op in OPS.values():
        home = op.reference.__module__.replace(".", "/") + ".py"
        if op.name in ("embed", "rms_norm", "rope", "sample"):
            continue  # inside the functions that are named
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


def test_no_word_is_explained_twice() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("| **"):
            words += re.findall(r"\*\*([^*]+)\*\*", line.split("|")[1])
    assert len(words) > 40
    assert len(words) == len(set(words))
