"""The command from outside: what it prints, its exit codes, and no traceback for bad input."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4.ops.fused.block
from dsv4 import __version__
from dsv4.cli import main
from dsv4.config import EngineConfig
from dsv4.engine import Engine
from dsv4.errors import RankError
from dsv4.request import Output
from dsv4.testing import random_weights
from tests.models import fast_config, write_fast_model
from tests.oracle.reference import Reference, transformers_model

SMALL = ("--max-context", "200", "--chunk-tokens", "32")


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        return " ".join(self.err.split())


Cli = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run the command in this process; a Dsv4Error that gets out is a traceback."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["dsv4", *map(str, arguments)])
        code = 0
        capsys.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        out, err = capsys.readouterr()
        return Result(code, out, err)

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


def spawn(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dsv4.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fast_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([i * 7 % 250 for i in range(50)]))
    return path


# --- help -------------------------------------------------------------------------------------


def test_help_loads_nothing_slow() -> None:
    """What would make it wait is not imported; its time is the machine's."""
    code = (
        "import sys; sys.argv = ['dsv4', '--help']\n"
        "from dsv4.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for command in ("generate", "score", "chat", "plan", "check", "inspect", "convert"):
        assert command in result.stdout
    loaded = set(result.stderr.split())
    assert "dsv4.cli" in loaded
    slow = {"torch", "numpy", "triton", "transformers", "safetensors"}
    assert not loaded & (slow | {"fastapi", "uvicorn", "prometheus_client", "xgrammar"})


@pytest.mark.parametrize("moment", ["import", "run", "ignored"])
def test_ctrl_c_before_the_command_runs(moment: str) -> None:
    """While modules are imported the signal ends the process; then it is Python's again."""
    code = f"""if True:
        import os, signal, sys
        usual = signal.SIG_IGN if "{moment}" == "ignored" else signal.default_int_handler
        signal.signal(signal.SIGINT, usual)
        class Interrupt:
            def find_spec(self, name, path=None, target=None):
                if name == "dsv4.cli" and "{moment}" != "run":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt())
        from dsv4.__main__ import main
        sys.argv = ["a path", "--version"]
        try:
            main()
        finally:
            print(signal.getsignal(signal.SIGINT) is usual)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == ""
    if moment == "import":
        assert (result.returncode, result.stdout) == (-signal.SIGINT, "")
    else:
        assert result.returncode == 0
        assert result.stdout == f"dsv4 {__version__}\nTrue\n"


@pytest.mark.parametrize("command", ["generate", "score"])
def test_a_command_has_an_example_and_every_engine_option(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert "Example: dsv4" in result.out
    for item in fields(EngineConfig):
        assert "--" + item.name.replace("_", "-")[:20] in result.out


def test_no_arguments_show_the_help(cli: Cli) -> None:
    result = cli()
    assert "generate" in result.out + result.err


# --- generate ---------------------------------------------------------------------------------


def test_generate_prints_text_and_stats(cli: Cli, model: Path) -> None:
    arguments = ("generate", model, "-p", "Hello", "--max-tokens", 6, "--temperature", 0, *SMALL)
    first = cli(*arguments, "--stats")
    assert first.code == 0, first.err
    assert first.out.endswith("\n")
    assert "tokens/s" in first.message
    assert "first after" in first.message
    assert cli(*arguments).out == first.out


def test_generate_ends_with_a_dead_rank(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "rank 1 was ended"

    def stream(*arguments: Any) -> Iterator[Output]:
        yield Output("r", (), "", "error", error=error)

    monkeypatch.setattr(Engine, "stream", stream)
    assert cli("generate", model, "-p", "Hello", *SMALL).code == 1
    monkeypatch.setattr(Engine, "failure", RankError(error))
    result = cli("generate", model, "-p", "Hello", *SMALL)
    assert (result.code, f"the answer broke off: {error}" in result.message) == (70, True)


def test_generate_reads_a_file_and_modes(cli: Cli, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    common = ("--max-tokens", 4, "--temperature", 0, *SMALL)
    by_file = cli("generate", model, "--prompt-file", file, *common)
    assert by_file.out == cli("generate", model, "-p", "Hello", "--chat", *common).out
    assert cli("generate", model, "-p", "Hello", "--raw", *common).code == 0
    assert cli("generate", model, "-p", "Hello", "--thinking", *common).code == 0


def test_a_seed_repeats(cli: Cli, model: Path) -> None:
    arguments = ("generate", model, "-p", "Hello", "--max-tokens", 8, "--seed", 4, *SMALL)
    assert cli(*arguments).out == cli(*arguments).out


def test_an_answer_that_breaks_off_is_an_error(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(dsv4.ops.fused.block, "router_experts", broken)
    result = cli("generate", model, "-p", "Hello", *SMALL)
    assert result.code == 1
    assert "the device fell off" in result.message
    assert "Traceback" not in result.err


# --- score ------------------------------------------------------------------------------------


def test_score_writes_logits_and_perplexity(
    cli: Cli, model: Path, ids: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    result = cli("score", model, "--ids", ids, "-o", out, *SMALL)
    assert result.code == 0, result.err
    logits = load_file(out)["logits"]
    assert logits.shape == (50, 271)
    tokens = torch.tensor(json.loads(ids.read_text()))
    chosen = torch.log_softmax(logits.double(), 1)[:-1].gather(1, tokens[1:, None])
    perplexity = float(torch.exp(-chosen.mean()))
    assert result.out.startswith("50 tokens, perplexity ")
    assert float(result.out.split()[-1]) == pytest.approx(perplexity, rel=1e-5)
    as_json = cli("score", model, "--ids", ids, "-o", out, "--logprobs", "--json", *SMALL)
    found = json.loads(as_json.out)
    assert found["tokens"] == 50
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    stored = load_file(out)
    assert list(stored) == ["logprobs"]
    torch.testing.assert_close(stored["logprobs"].double(), chosen.squeeze(1), atol=1e-5, rtol=0)


def test_one_token_has_no_perplexity(cli: Cli, model: Path, tmp_path: Path) -> None:
    ids, out = tmp_path / "ids.json", tmp_path / "out.safetensors"
    ids.write_text("[5]")
    result = cli("score", model, "--ids", ids, "-o", out, *SMALL)
    assert result.code == 0
    assert "at least 2" in result.out
    assert json.loads(cli("score", model, "--ids", ids, "-o", out, "--json", *SMALL).out) == {
        "tokens": 1,
        "perplexity": None,
    }


@pytest.mark.parametrize("original_format", [True, False])
def test_score_equals_transformers_on_its_own_checkpoint(
    cli: Cli, ids: Path, tmp_path: Path, original_format: bool
) -> None:
    config = fast_config()
    weights, tokens = random_weights(config, 3), json.loads(ids.read_text())
    oracle = transformers_model(config, weights)
    folder, out = tmp_path / "saved", tmp_path / "out.safetensors"
    oracle.save_pretrained(folder, save_original_format=original_format)
    reference = Reference(config, weights, [tokens])
    with reference.ties.step():
        result = cli("score", folder, "--ids", ids, "-o", out, *SMALL)
    assert result.code == 0, result.err
    [expected] = reference.logits
    assert expected.std() > 0.5
    assert (load_file(out)["logits"] - expected).abs().max() < 2e-4


# --- bad input --------------------------------------------------------------------------------


def damaged(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A model whose tensors were changed."""
    write_fast_model(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def missing_folder(folder: Path) -> Path:
    return folder / "nothing"


def empty_folder(folder: Path) -> Path:
    return folder


def no_weights(folder: Path) -> Path:
    write_fast_model(folder)
    (folder / "model.safetensors").unlink()
    return folder


def truncated(folder: Path) -> Path:
    write_fast_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def cut_in_the_header(folder: Path) -> Path:
    write_fast_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return folder


def garbage(folder: Path) -> Path:
    write_fast_model(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 5000)
    return folder


def broken_header(folder: Path) -> Path:
    write_fast_model(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20:24] = b"\x00{{{"
    file.write_bytes(data)
    return folder


def nan_weight(folder: Path) -> Path:
    def change(tensors: dict[str, Any]) -> None:
        tensors["layers.1.attn.wq_a.weight"][3, 5] = float("nan")

    return damaged(folder, change)


def tensor_missing(folder: Path) -> Path:
    return damaged(folder, lambda tensors: tensors.pop("layers.2.attn.attn_sink"))


def tensor_extra(folder: Path) -> Path:
    return damaged(folder, lambda tensors: tensors.update(surprise=torch.zeros(3)))


def wrong_shape(folder: Path) -> Path:
    def change(tensors: dict[str, Any]) -> None:
        tensors["layers.0.attn.wkv.weight"] = torch.zeros(31, 64)

    return damaged(folder, change)


def config_contradicts(folder: Path) -> Path:
    write_fast_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_attention_heads": 8}))
    return folder


def other_model(folder: Path) -> Path:
    write_fast_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llama"}))
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (missing_folder, ("nothing", "expected a folder")),
        (empty_folder, ("config.json",)),
        (no_weights, ("safetensors",)),
        (truncated, ("model.safetensors",)),
        (cut_in_the_header, ("model.safetensors",)),
        (garbage, ("model.safetensors",)),
        (broken_header, ("model.safetensors",)),
        (nan_weight, ("layers.1.attn.wq_a.weight", "nan", "finite", "fetch it again")),
        (tensor_missing, ("layers.2.attn.attn_sink", "missing")),
        (tensor_extra, ("surprise",)),
        (wrong_shape, ("layers.0.attn.wkv.weight", "31", "expected")),
        (config_contradicts, ("layers.0.attn", "expected")),
        (other_model, ("llama", "deepseek_v4")),
    ],
)
def test_bad_checkpoints(
    cli: Cli, ids: Path, tmp_path: Path, make: Callable[[Path], Path], says: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    out = tmp_path / "out.safetensors"
    result = cli("score", make(folder), "--ids", ids, "-o", out, *SMALL)
    assert result.code == 1
    assert "error:" in result.err
    assert "Traceback" not in result.err
    for word in says:
        assert word in result.message, result.message
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1, 271]", ("token 1", "271", "0 to 270")),
        ("[1, -1]", ("token 1", "-1")),
        ('[1, "2"]', ("token 1", "'2'")),
        ("[]", ("empty", "at least one token")),
        (json.dumps([1] * 201), ("201 tokens", "200", "max_context")),
        ('{"ids": [1]}', ("dict", "expected a list")),
        ("[1, 2", ("not valid JSON", "[1, 2, 3]")),
        ("[" * 100_000, ("not valid JSON",)),
        (None, ("cannot read",)),
    ],
)
def test_bad_ids(
    cli: Cli, model: Path, tmp_path: Path, content: str | None, says: tuple[str, ...]
) -> None:
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_text(content)
    result = cli("score", model, "--ids", path, "-o", tmp_path / "out.safetensors", *SMALL)
    assert result.code == 2
    assert "Traceback" not in result.err
    for word in says:
        assert word in result.message, result.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--max-tokens", "-3"), "max_tokens is -3"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--top-p", "0"), "top_p is 0.0"),
        (("--top-p", "1.5"), "top_p is 1.5"),
        (("--top-k", "-1"), "top_k is -1"),
        (("--min-p", "2"), "min_p is 2.0"),
        (("--seed", str(2**64)), "seed is"),
        (("--stop", ""), "stop is"),
        (("--kv-format", "fp3"), "kv_format is 'fp3'"),
        (("--dtype", "float64"), "dtype is 'float64'"),
        (("--device", "tpu"), "device is 'tpu'"),
        (("--max-context", "0"), "max_context is 0"),
        (("--max-context", "99999"), "max_context is 99999"),
        (("--ops", "wings"), "ops names 'wings'"),
        (("--chat", "--raw"), "one of --chat, --thinking and --raw"),
        (("--prompt-file", "x.txt"), "one of them"),
        (("--max-context", "3"), "at most 2"),
        (("--nonsense",), "--nonsense"),
        (("--top-k", "many"), "--top-k"),
    ],
)
def test_bad_options(cli: Cli, model: Path, options: tuple[str, ...], says: str) -> None:
    base = ("--max-context", "200") if "--max-context" not in options else ()
    result = cli("generate", model, "-p", "Hello there", *base, *options)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert says in result.message, result.message


def test_bad_prompts(cli: Cli, model: Path, tmp_path: Path) -> None:
    for options in (("--raw", "-p", ""), ("-p", ""), ("-p", " \n")):  # like a variable not set
        result = cli("generate", model, *options, *SMALL)
        assert (result.code, result.out) == (2, "")
        assert "the prompt is empty; give it with -p TEXT" in result.message
    assert (
        "cannot read the prompt"
        in cli("generate", model, "--prompt-file", tmp_path / "no.txt", *SMALL).message
    )
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    result = cli("generate", model, "--prompt-file", tmp_path / "bad.txt", *SMALL)
    assert result.code == 2
    assert "cannot read the prompt" in result.message


OUTPUTS = {  # option -> the command before it
    "score -o": ("score", "{model}", "--ids", "{ids}", "-o"),
    "doctor --report": ("doctor", "{model}", "--report"),
    "doctor --picture": ("doctor", "{model}", "--picture"),
    "doctor --save": ("doctor", "{model}", "--save"),
    "bench ops --record": ("bench", "ops", "--predict", "b200", "--record"),
    "bench decode --record": ("bench", "decode", "--shape", "trial", "--device", "cpu", "--record"),
    "bench decode --plot": ("bench", "decode", "--shape", "trial", "--device", "cpu", "--plot"),
    "bench serve --record": ("bench", "serve", "{model}", "--record"),
    "serve --trace": ("serve", "{model}", "--trace"),
    "--prefix-disk": ("generate", "{model}", "-p", "x", *SMALL, "--prefix-disk"),
    "--audit-folder": (
        "generate", "{model}", "-p", "x", *SMALL, "--audit-share", "1", "--audit-folder"
    ),
}  # fmt: skip


@pytest.mark.parametrize("option", OUTPUTS)
def test_outputs_are_refused_before_work_begins(
    option: str, cli: Cli, model: Path, ids: Path, tmp_path: Path
) -> None:
    """A file where a folder ought to be: nobody can write there, not even root."""
    (tmp_path / "file").touch()
    command = [part.format(model=model, ids=ids) for part in OUTPUTS[option]]
    result = cli(*command, tmp_path / "file" / "out")
    assert result.code == 2
    assert "Traceback" not in result.err
    assert "cannot write" in result.message
    assert result.out == ""


def test_missing_folders_of_an_output_are_made(
    cli: Cli, model: Path, ids: Path, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "folder" / "out.safetensors"
    assert cli("score", model, "--ids", ids, "-o", file, *SMALL).code == 0
    assert load_file(file)["logits"].shape[1] == 271
    result = cli("score", model, "--ids", ids, "-o", tmp_path)
    assert result.code == 2
    assert "it is a folder" in result.message


def test_a_full_disk_leaves_no_half_of_a_file(
    cli: Cli, model: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = cli("score", model, "--ids", ids, "-o", tmp_path / "out.safetensors", *SMALL)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "the disk is full" in result.message
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize("name", ["listdir", "is_file"])
def test_a_folder_that_may_not_be_read(
    name: str, cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os if name == "listdir" else Path, name, refuse)
    result = cli("generate", model, "-p", "x")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "Permission denied" in result.message
    assert str(model) in result.message.replace(" ", "")


def test_an_error_of_the_system_is_one_line(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes from: here a file that was readable when the command began."""

    def refuse(*given: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "model.safetensors")

    monkeypatch.setattr(Engine, "load", refuse)
    result = cli("generate", model, "-p", "x", *SMALL)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "model.safetensors: Permission denied" in result.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_here(cli: Cli, model: Path) -> None:
    result = cli("generate", model, "-p", "x", "--device", "cuda")
    assert result.code == 2
    assert "no GPU" in result.message


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    plain = spawn("generate", missing, "-p", "x")
    assert plain.returncode == 1
    assert plain.stdout == ""
    assert "Traceback" not in plain.stderr
    assert missing in plain.stderr  # whole, not cut by the terminal's width
    debug = spawn("--debug", "generate", missing, "-p", "x")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert "CheckpointError" in debug.stderr
