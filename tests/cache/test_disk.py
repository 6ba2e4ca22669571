"""Prefixes on disk: found again after a restart, to the bit; anything wrong counts as absent."""

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4 import Engine, SamplingParams
from dsv4.cache import disk
from dsv4.errors import OptionError
from dsv4.request import Completion
from tests.models import write_quick_model

PARAMS = SamplingParams(max_tokens=3, temperature=1.0, seed=5, logprobs=2, stop_ids=())
PROMPT = random.Random(1).choices(range(256), k=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quick_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Completion:
    [answer] = Engine.load(model, prefix_cache=False, max_sequences=1).generate([PROMPT], PARAMS)
    return answer


def make(model: Path, folder: Path, **choices: Any) -> Engine:
    small = {"max_context": 600, "max_sequences": 2, "prefix_disk": str(folder)}
    return Engine.load(model, device="cpu", **{**small, **choices})


def check(engine: Engine, expected: Completion, num_cached: int) -> None:
    [found] = engine.generate([PROMPT], PARAMS)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
    assert found.num_cached == num_cached
    engine.check_integrity()


def fill(model: Path, folder: Path) -> list[Path]:
    engine = make(model, folder)
    engine.generate([PROMPT], PARAMS)
    engine.close()
    return sorted(folder.glob("*/*.prefix"))


def test_a_restarted_engine_hits(model: Path, expected: Completion, tmp_path: Path) -> None:
    assert len(fill(model, tmp_path)) == 1
    again = make(model, tmp_path)
    check(again, expected, 256)
    assert again.stats().num_prefix_hit == 256


@pytest.mark.parametrize("formats", [{"kv_format": "fp8", "index_format": "fp4"}])
def test_packed_formats_come_back(model: Path, formats: dict[str, str], tmp_path: Path) -> None:
    engine = make(model, tmp_path, **formats)
    [first] = engine.generate([PROMPT], PARAMS)
    engine.close()
    [again] = make(model, tmp_path, **formats).generate([PROMPT], PARAMS)
    assert again.num_cached == 256
    assert again.logprobs == first.logprobs


def test_eviction_spills_and_a_later_request_brings_it_back(
    model: Path, expected: Completion, tmp_path: Path
) -> None:
    engine = make(model, tmp_path, max_sequences=1, chunk_tokens=128)  # four snapshots
    engine.generate([PROMPT], PARAMS)
    for number in range(4):
        engine.generate([[number] * 130], PARAMS)
    assert list(tmp_path.glob("*/*.prefix"))
    check(engine, expected, 256)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other model", "header"])
def test_a_damaged_file_is_reported_and_removed(
    model: Path,
    expected: Completion,
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    [path] = fill(model, tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-100]
    elif damage == "flip":
        data[-50] ^= 1
    elif damage == "empty":
        data = bytearray()
    elif damage == "header":
        data[8:40] = b"x" * 32
    else:
        beginning = path.parent.name.encode()  # of the fingerprint
        data = bytearray(bytes(data).replace(beginning, b"0" * len(beginning)))
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        check(make(model, tmp_path), expected, 0)
    assert "cannot be used" in caplog.text
    assert not path.exists()


def test_swapped_files_are_not_taken_for_each_other(
    model: Path, expected: Completion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(model, tmp_path)
    for prompt in (PROMPT, PROMPT[::-1]):
        engine.generate([prompt], PARAMS)
    engine.close()
    one, two = tmp_path.glob("*/*.prefix")
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    check(make(model, tmp_path), expected, 0)
    assert "its key is" in caplog.text


def test_only_the_owner_can_read_prefixes(model: Path, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        [path] = fill(model, tmp_path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    make(model, tmp_path)
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_opened(
    model: Path, expected: Completion, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = fill(model, tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    if what == "link":
        path.symlink_to(elsewhere)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    check(make(model, tmp_path), expected, 0)
    assert "cannot be used" in caplog.text
    assert elsewhere.exists()


def test_a_folder_that_is_a_link_is_not_followed(
    model: Path, expected: Completion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = fill(model, tmp_path)
    elsewhere = path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(elsewhere)
    check(make(model, tmp_path), expected, 0)
    assert "no more prefixes are written" in caplog.text


def test_names_of_unfinished_files_cannot_be_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk.DiskStore(tmp_path, "m", lambda counts: {})
    names: list[str] = []
    replace = os.replace

    def note(source: str, *rest: Any, **options: Any) -> None:
        names.append(source)
        replace(source, *rest, **options)

    monkeypatch.setattr(os, "replace", note)
    for number in range(2):
        store.save(bytes([number]) * 16, 128, {"a": torch.zeros(8)})
    assert len(set(names)) == 2
    for number, name in enumerate(names):
        assert (bytes([number]) * 16).hex() not in name
        assert len(name) >= 32


def test_another_model_or_format_does_not_share(model: Path, tmp_path: Path) -> None:
    fill(model, tmp_path)
    [found] = make(model, tmp_path, kv_format="bf16").generate([PROMPT], PARAMS)
    assert found.num_cached == 0


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_disk_that_cannot_be_written_ends_the_writing_only(
    model: Path,
    expected: Completion,
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28 if what == "full" else 30, os.strerror(28 if what == "full" else 30))

    engine = make(model, tmp_path)
    monkeypatch.setattr(os, "fsync" if what == "full" else "replace", refuse)
    if what == "read-only":
        monkeypatch.setattr(Path, "replace", refuse)
    check(engine, expected, 0)
    engine.close()
    assert caplog.text.count("no more prefixes are written") == 1
    assert list(tmp_path.glob("*/*")) == []
    check(engine, expected, 256)


def test_a_folder_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionError, match=r"cannot write .*folder: Not a directory"):
        make(model, tmp_path / "file" / "folder")


def test_the_folder_stays_within_its_limit(tmp_path: Path) -> None:
    store = disk.DiskStore(tmp_path, "m", lambda counts: {})
    tensors = {"a": torch.zeros(1000)}
    store.save(b"\0" * 16, 128, tensors)
    store._limit = 3 * sum(store._files.values())
    for number in range(1, 6):
        store.save(bytes([number]) * 16, 128, tensors)
    assert [bytes([n]) * 16 in store for n in range(6)] == [False] * 3 + [True] * 3
    assert len(list(tmp_path.glob("m/*"))) == 3


def test_kill_and_restart(model: Path, expected: Completion, tmp_path: Path) -> None:
    """Killed while it writes: what is there afterwards is whole, or ignored."""
    script = f"""
        import os, signal, sys
        from dsv4 import Engine, SamplingParams
        from dsv4.cache import disk
        engine = Engine.load({str(model)!r}, device="cpu", max_context=600, max_sequences=2,
                             prefix_disk={str(tmp_path)!r})
        params = SamplingParams(max_tokens=1, stop_ids=())
        engine.generate([{PROMPT}], params)
        engine.close()
        engine.generate([[7] * 300], params)
        disk.os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # in the second file
        engine.close()
    """
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120)
    assert done.returncode == -signal.SIGKILL, f"after {time.monotonic() - begin:.0f} s"
    assert len(list(tmp_path.glob("*/*.prefix"))) == 1
    assert len(list(tmp_path.glob("*/*.tmp"))) == 1
    engine = make(model, tmp_path)
    assert list(tmp_path.glob("*/*.tmp")) == []
    check(engine, expected, 256)
    assert engine.generate([[7] * 300], PARAMS)[0].num_cached == 0
