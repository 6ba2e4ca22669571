"""The package as others get it: typed exports, one version, a complete wheel, its dependencies."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import dsv4
from dsv4 import Engine, EngineConfig, EngineOptions, OptionError, SamplingParams
from scripts import check_release

ROOT = Path(__file__).parent.parent
CLIENT = ROOT / "tests" / "typed_client.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# distributions whose module has another name
MODULES = {"pytest-xdist": "xdist", "pyyaml": "yaml"}
# used without an import: test plug-ins, commands, what another package takes where it finds it
NOT_IMPORTED = {
    "pytest-xdist": "make test",
    "pytest-timeout": "pytest's `timeout`",
    "ruff": "make lint",
    "mypy": "make lint",
    "pre-commit": ".pre-commit-config.yaml",
    "hatchling": "the build backend",
    "uvloop": "uvicorn's event loop",
}
# in environments of their own, made by the Makefile or asked for by the script that needs them
ELSEWHERE = {"mkdocs", "playwright", "axe_playwright_python", "modelopt", "llmcompressor"}
ELSEWHERE |= {"compose_spec", "kubernetes_validate"}  # make ray


def test_type_checkers_see_the_exports() -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(CLIENT)]
    command += ["--no-error-summary", "--show-error-codes", "--no-pretty"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = set(re.findall(r"^tests/typed_client\.py:(\d+): error: .*\[([\w-]+)\]$", out, re.M))
    lines = enumerate(CLIENT.read_text().splitlines(), start=1)
    marks = ((number, re.search(r"# E: ([\w-]+)$", line)) for number, line in lines)
    assert found == {(str(number), mark[1]) for number, mark in marks if mark}, out


def test_exports_are_the_classes_themselves() -> None:
    tree = ast.parse((ROOT / "dsv4" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {a.name: n.module for n in imports for a in n.names if (n.module or "")[:4] == "dsv4"}
    assert sorted(homes) == dsv4.__all__, "the imports for type checkers and __all__ agree"
    for name, home in homes.items():
        found = getattr(dsv4, name)
        assert found is getattr(sys.modules[str(home)], name)
        assert name in dir(dsv4)
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        dsv4.Enginee  # type: ignore[attr-defined]  # noqa: B018


def test_every_export_is_documented() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text()
    assert [name for name in dsv4.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_options_for_editors_are_those_of_the_config() -> None:
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(TypeError, match="max_tokns"):
        SamplingParams(max_tokns=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="unknown option 'max_contxt'"):
        Engine.load("tiny", max_contxt=3)  # type: ignore[call-arg]


def test_the_version_is_said_once() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert len(re.findall(r"__version__ =", (ROOT / "dsv4" / "__init__.py").read_text())) == 1
    changelog = (ROOT / "CHANGELOG.md").read_text()
    number, dev, _ = dsv4.__version__.partition(".dev")
    released = re.search(rf"^## {re.escape(number)} - \d{{4}}-\d\d-\d\d$", changelog, re.M)
    assert (released is None) == bool(dev), "what the changelog has is no development version"
    assert dev or not re.search(r"^## Unreleased\n+- ", changelog, re.M), "another number is due"


@pytest.mark.parametrize(
    ("version", "unreleased", "says"),
    [
        ("0.2.0.dev0", "- new", r"Set it to 0\.2\.0 in dsv4/__init__\.py, move what CHANGELOG\.md"),
        ("0.2.0", "- new", r"move them under 0\.2\.0, or set __version__ to a higher number"),
        ("0.3.0", "", r"has no section 0\.3\.0"),
        ("0.2.0", "", None),
    ],
)
def test_a_release_says_what_it_needs(
    version: str, unreleased: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = f"# Changelog\n\n## Unreleased\n\n{unreleased}\n\n## 0.2.0 - 2026-11-17\n\n- old\n"
    (tmp_path / "CHANGELOG.md").write_text(log)
    monkeypatch.setattr(check_release, "ROOT", tmp_path)

    def prepare() -> str:
        check_release.refuse_development(version)
        return check_release.changes(version)

    if says is None:
        assert prepare() == "- old"
        return
    with pytest.raises(SystemExit, match=says):
        prepare()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [found] = folder.glob("*.whl")
    return found


def test_the_wheel_has_everything_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"dsv4-{dsv4.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "dsv4"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:  # not a checkout otherwise
        assert {name for name in names if name.startswith("dsv4/")} == set(listed.stdout.split())
    for name in ("py.typed", "models/tiny/model.safetensors", "server/static/index.html"):
        assert f"dsv4/{name}" in names
    others = {Path(name).parts[0] for name in names if not name.startswith("dsv4/")}
    assert others == {f"dsv4-{dsv4.__version__}.dist-info"}


def test_predictions_need_no_checkout(wheel: Path, tmp_path: Path) -> None:
    """Records are not in a wheel; measured times and their records' names are."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import sys; sys.path.insert(0, 'site'); import dsv4.cli; print(dsv4.__file__)"
    for words, says in (
        ("ops --predict b200 --only wq_b --tokens 1", "H200"),
        ("parallel --predict flash --tp 1", "measured"),
    ):
        run = f"{code}; sys.argv = 'dsv4 bench {words}'.split(); dsv4.cli.main()"
        command = [sys.executable, "-P", "-c", run]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(tmp_path / "site")), "another dsv4 was imported"
        assert re.search(says + r": \d{4}-\d\d-\d\d_h200_\w+\.jsonl", done.stdout)


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    return {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in lines} - {"dsv4"}  # its extras


def imported(*folders: str) -> Iterator[str]:
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
                yield str(ast.literal_eval(node.args[0]))


def test_dependencies_are_used_and_declared() -> None:
    names = {MODULES.get(name, name.replace("-", "_")): name for name in declared()}
    own = {"dsv4", "tests", "training", "benchmarks", "scripts"}
    used = {name for name in imported(*own) if name not in sys.stdlib_module_names} - own
    unused = {name for module, name in names.items() if module not in used} - NOT_IMPORTED.keys()
    assert not unused, "declared, but nothing imports it"
    parts_of_others = {"pydantic_core"}  # of pydantic, which pins it
    assert used - names.keys() - parts_of_others - ELSEWHERE == set(), "imported, not declared"


def test_kernels_are_declared_for_both_kinds_of_linux_machine() -> None:
    [triton] = [line for line in PROJECT["dependencies"] if line.startswith("triton")]
    assert "x86_64" in triton
    assert "aarch64" in triton
    for name in ("triton", "uvicorn"):  # their internals are used: only tested versions
        extras = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
        lines = [line for line in (*PROJECT["dependencies"], *extras) if line.startswith(name)]
        assert len(lines) == 1
        assert re.search(r">=[\d.]+,<[\d.]+", lines[0])
