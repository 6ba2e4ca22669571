"""What an operator may say about replicas, and what is answered without Ray."""

import sys

import pytest

from dsv4.cli import main
from dsv4.deploy.options import RayOptions
from dsv4.errors import OptionError


@pytest.mark.parametrize(("text", "limits"), [("3", (3, 3)), ("1-8", (1, 8)), (" 2 ", (2, 2))])
def test_replicas(text: str, limits: tuple[int, int]) -> None:
    assert RayOptions(replicas=text).limits == limits


@pytest.mark.parametrize("text", ["", "0", "0-3", "3-1", "many", "-2", "1-", "1.5"])
def test_wrong_replicas(text: str) -> None:
    with pytest.raises(OptionError, match="LEAST-MOST"):
        RayOptions(replicas=text)


def test_other_wrong_values() -> None:
    with pytest.raises(OptionError, match="ingress_replicas is 0"):
        RayOptions(ingress_replicas=0)
    with pytest.raises(OptionError, match="health_seconds is 0"):
        RayOptions(health_seconds=0.0)
    with pytest.raises(OptionError, match="replica_cpus is -1"):
        RayOptions(replica_cpus=-1.0)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dsv4", "serve", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_ray_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("dsv4.deploy.")]:
        if name != "dsv4.deploy.options":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(monkeypatch, "--ray") == OptionError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert "--ray needs the package 'ray', which is not installed" in said
    assert "pip install 'dsv4[ray]'" in said
    assert "Traceback" not in said


def test_replicas_need_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--replicas", "3") == OptionError.exit_code
    assert "options about replicas need --ray" in " ".join(capsys.readouterr().err.split())
