"""A checkpoint's fingerprint: a changed bit changes it, nothing else does, files are read once."""

import os
import shutil
from pathlib import Path

import pytest

from dsv4.cache import fingerprint as module
from dsv4.cache.fingerprint import KEPT, fingerprint
from tests.models import write_quick_model

CPU = {"device": "cpu"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_quick_model(tmp_path / "model")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights' files that were read whole."""
    names: list[str] = []
    right = module._digest

    def digest(path: Path) -> str:
        if path.suffix == ".safetensors":
            names.append(path.name)
        return right(path)

    monkeypatch.setattr(module, "_digest", digest)
    return names


def flip(path: Path, place: int) -> None:
    """One bit, with the times set back as a careful editor would."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("share", [0.11, 0.37, 0.62, 0.95])
def test_one_bit_anywhere_changes_it(share: float, model: Path, kept: Path) -> None:
    one = fingerprint(model, CPU, kept)
    weights = model / "model.safetensors"
    place = int(weights.stat().st_size * share)
    flip(weights, place)
    assert fingerprint(model, CPU, kept) != one
    flip(weights, place)
    assert fingerprint(model, CPU, kept) == one


def test_settings_and_config_change_it(model: Path, kept: Path) -> None:
    one = fingerprint(model, CPU, kept)
    assert fingerprint(model, {"device": "cuda"}, kept) != one
    with open(model / "config.json", "a") as file:
        file.write("\n")
    assert fingerprint(model, CPU, kept) != one


def test_a_copy_is_the_same_checkpoint(model: Path, kept: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy", CPU, kept) == fingerprint(model, CPU, kept)


def test_files_are_read_whole_once(model: Path, kept: Path, digested: list[str]) -> None:
    one = fingerprint(model, CPU, kept)
    assert fingerprint(model, CPU, kept) == one
    assert digested == ["model.safetensors"]
    os.utime(model / "model.safetensors")  # touched: read again, and found to be the same
    assert fingerprint(model, CPU, kept) == one
    assert len(digested) == 2


@pytest.mark.parametrize("harm", ["damaged", "writable by others", "a link", "a folder"])
def test_kept_digests_are_believed_only_when_sound(
    harm: str, model: Path, kept: Path, digested: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = fingerprint(model, CPU, kept)
    file = kept / KEPT
    assert file.stat().st_mode & 0o777 == 0o600
    forged = file.read_text().replace('"digest": "', '"digest": "00')
    if harm == "damaged":
        file.write_text("{" + forged)
    elif harm == "writable by others":
        file.write_text(forged)
        file.chmod(0o666)
    else:
        file.rename(kept / "elsewhere")
        (kept / "elsewhere").write_text(forged)
        if harm == "a link":
            file.symlink_to(kept / "elsewhere")
        else:
            file.mkdir()
    assert fingerprint(model, CPU, kept) == one
    assert len(digested) == 2
    assert "digested again" in caplog.text


def test_without_a_place_to_keep_them(model: Path, kept: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    assert fingerprint(model, CPU, nowhere) == fingerprint(model, CPU, kept)
