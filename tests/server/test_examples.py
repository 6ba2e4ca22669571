"""Every file in `examples/` runs as it stands and says what it promises."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.server.support import ROOT, Server

EXAMPLES = ROOT / "examples"
ALONE = {
    "01_generate": "The capital of France is Paris. (stop)",
    "02_stream": "The capital of Japan is Tokyo.",
    "03_asyncio": "The capital of Kenya is Nairobi.",
    "05_structured": "{'country': 'France', 'capital': 'Paris'}",
    "09_long_document": "The password of Hugo is saffron. (256 prompt tokens",
}
SERVED = {
    "04_tools": 'get_weather({"city": "Paris"}) -> ',
    "07_openai_client": "932",
    "08_anthropic_client": "The capital of Kenya is Nairobi.",
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
    runpy.run_path(path, run_name="__main__")


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert names == {*ALONE, *SERVED, "06_batch_file", "10_notebook"}
    listed = re.findall(r"\]\((\d\d_\w+)\.", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(names)


@pytest.mark.parametrize("name", ALONE)
def test_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, monkeypatch)
    assert ALONE[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", SERVED)
def test_with_a_server(
    name: str, tiny: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, monkeypatch, tiny.url)
    out = capsys.readouterr().out
    assert SERVED[name] in out
    assert out.splitlines()[-1]


def test_a_file_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": 7, "prompt": "What is the capital of Peru?"}\n')
    run("06_batch_file", monkeypatch, source, target)
    [line] = target.read_text().splitlines()
    assert json.loads(line)["answer"] == "The capital of Peru is Lima."
    assert json.loads(line)["id"] == 7


def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "10_notebook.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    assert names["answer"].text.startswith("The capital of Peru")  # type: ignore[attr-defined]
    assert capsys.readouterr().out.count("TokenLogprobs") > 3
