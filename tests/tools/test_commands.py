"""inspect, check, plan and convert as commands: output, JSON, exit codes."""

import json
import re
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from dsv4.cli import check, convert, inspect, plan
from dsv4.errors import CheckpointError, OptionError
from tests.checkpoint import writers

app = Typer()
for command in (inspect, check, plan, convert):
    command.register(app)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "150"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writers.save(writers.made("official"), tmp_path_factory.mktemp("model") / "official")


@pytest.mark.parametrize("name", ["inspect", "check", "plan", "convert"])
def test_help_has_an_example(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert re.search(rf"Examples?: dsv4 {name}\b", result.stdout)
    assert "--json" in result.stdout


def test_inspect(folder: Path) -> None:
    text = run("inspect", folder)
    assert text.exit_code == 0
    for words in ("official FP8 + MXFP4 experts", "mxfp4", "draft: mtp, 1 block(s)", "ratio 128"):
        assert words in text.stdout
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert found["layout"] == "official"
    assert found["num_tensors"] == len(writers.made("official").disk)


def test_check_passes_and_fails_by_exit_code(folder: Path, tmp_path: Path) -> None:
    assert run("check", folder).exit_code == 0
    good = run("check", folder, "--values", "--json")
    assert good.exit_code == 0
    assert json.loads(good.stdout)["ok"] is True
    written = writers.made("official")
    del written.disk["norm.weight"]
    broken = writers.save(written, tmp_path)
    text = run("check", broken)
    assert text.exit_code == 1
    assert "norm.weight" in text.stdout
    found = json.loads(run("check", broken, "--json").stdout)
    assert found["ok"] is False
    assert found["findings"][0]["tensor"] == "norm.weight"


def test_plan(folder: Path) -> None:
    text = run("plan", "flash", "--users", "32", "--context", "100000", "--memory", "192")
    assert text.exit_code == 0
    assert "159.61 GB on disk" in text.stdout
    assert "█" in text.stdout
    assert "--max-sequences 32 --max-context 100000" in text.stdout
    found = json.loads(run("plan", "pro", "--json", "--memory", "1000").stdout)
    assert found["checkpoint_bytes"] == 864_704_792_696
    assert found["possible"] is True
    assert found["settings"]["max_sequences"] == 32
    too_small = run("plan", "pro", "--expert-memory", "all")
    assert too_small.exit_code == 1
    assert "it would not start" in too_small.stdout
    several = run("plan", "pro", "--gpus", "8")
    assert several.exit_code == 0
    for words in ("use tp 8, pp 1", "one rank of tp 8, pp 1", "predicted, not run"):
        assert words in several.stdout
    found = json.loads(run("plan", "pro", "--gpus", "16", "--nodes", "2", "--gpu", "h100",
                           "--json").stdout)  # fmt: skip
    assert found["recommended"] == [8, 2]
    assert [len(row["stages"]) for row in found["forecasts"] if row["fits"]][-1] == 2
    assert run("plan", "pro", "--gpus", "8", "--gpu", "h100").exit_code == 1
    one = run("plan", "flash", "--tp", "2").exception
    assert isinstance(one, OptionError)
    assert "give --gpus 2" in str(one)
    own = json.loads(run("plan", folder, "--json").stdout)
    assert own["weights"] == "official"


def test_what_a_plan_is_for_is_named() -> None:
    """Its times are those of a card, whatever memory it is given."""
    for arguments, named in (
        (("--memory", "180"), "one H200 of 180 GB"),
        (("--gpu", "rtx-pro-6000"), "one RTX PRO 6000 of "),
        (("--gpu", "RTX PRO 6000"), "one RTX PRO 6000 of "),  # as the README's table has it
        (("--gpu", "a100", "--weights", "bf16"), "dsv4 plan flash --gpus 2 --gpu a100"),
        (("--gpus", "2", "--users", "4", "--context", "100000"), "x 100,000"),
    ):
        assert named in run("plan", "flash", *arguments).stdout
    wide = CliRunner().invoke(app, ["plan", "pro", "--gpus", "8"], env={"COLUMNS": "80"}).stdout
    assert re.search(r"^│ +8 │ +1 │ 120.9 .*│ use │$", wide, re.M)  # on one line of a terminal


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("flsh",), "one of: flash, pro, tiny"),
        (("deepseek-ai/DeepSeek-V4-Flash",), "one of: flash, pro, tiny"),  # no download to plan
        (("flash", "--memory", "0"), "--memory"),
        (("flash", "--memory", "inf"), "--memory"),
        (("flash", "--context", "4096", "--context", "2000000"), "the model's limit is 1048576"),
        (("flash", "--gpus", "4", "--context", "4096"), "--users"),
        (("flash", "--tp", "3"), "1, 2, 4, 8"),
    ],
)
def test_a_plan_ignores_nothing(arguments: tuple[str, ...], words: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code != 0
    assert words in result.output + str(result.exception)


def test_convert(folder: Path, tmp_path: Path) -> None:
    text = run("convert", folder, tmp_path / "a", "--to", "nvfp4")
    assert text.exit_code == 0
    assert "every tensor is exact" in text.stdout
    found = json.loads(run("convert", folder, tmp_path / "b", "--to", "nvfp4-all", "--json").stdout)
    assert found["groups"]["routed experts"]["relative_rms"] == 0
    assert found["groups"]["attention"]["relative_rms"] > 0.05
    assert found["dropped"] > 0


def test_wrong_use_and_missing_folders(folder: Path, tmp_path: Path) -> None:
    """Errors travel as exceptions; `main` prints them and exits with their code."""
    cases = [
        (("inspect", tmp_path / "none"), CheckpointError),
        (("check", tmp_path / "none"), CheckpointError),
        (("plan", tmp_path / "none"), CheckpointError),
        (("convert", tmp_path / "none", tmp_path / "out"), CheckpointError),
        (("plan", "flash", "--weights", "int4"), OptionError),
        (("convert", folder, tmp_path / "out", "--to", "int4"), OptionError),
        (("convert", folder, folder / "config.json"), OptionError),
    ]
    for arguments, kind in cases:
        result = run(*arguments)
        assert isinstance(result.exception, kind), arguments
    assert run("plan").exit_code == 2
    assert run("inspect", folder, "--bogus").exit_code == 2


def test_inspect_of_a_cut_file_fails(tmp_path) -> None:
    folder = writers.save(writers.made("official"), tmp_path, shards=1)
    assert run("inspect", folder).exit_code == 0
    with open(folder / "model-00001-of-00001.safetensors", "r+b") as file:
        file.truncate(1000)
    result = run("inspect", folder)
    assert result.exit_code == 1
    assert "cut off" in result.output
