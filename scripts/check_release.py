"""Build a release and check it in an environment of its own (`make release`).

    python scripts/check_release.py            as a user gets it, with dependencies from an index
    python scripts/check_release.py --borrow   no index: the other packages of this environment

Builds the wheel and the source archive into dist, installs the wheel into build/release, and runs
there, in an empty folder: commands, a type checker on a small client, a server that answers. Ends
with the text of the tag, build/release/tag.txt; making the tag is left to you.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, HOME = ROOT / "dist", ROOT / "build" / "release"
START_SECONDS = 300.0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fail(text: str) -> None:
    raise SystemExit(f"no release: {text}")


def run(*command: object, cwd: Path = ROOT) -> str:
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        fail(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def read_version() -> str:
    found = re.search(r'^__version__ = "(.*?)"', (ROOT / "dsv4/__init__.py").read_text(), re.M)
    assert found is not None
    return found[1]


def refuse_development(version: str) -> None:
    if re.fullmatch(r"\d+\.\d+\.\d+", version):
        return
    number = version.partition(".dev")[0]
    fail(
        f"__version__ is {version}, the code on the way to {number}. Set it to {number} in "
        f"dsv4/__init__.py, move what CHANGELOG.md has under Unreleased to ## {number} - "
        f"{time.strftime('%Y-%m-%d')}, commit, and run make release again. After the tag set "
        "__version__ to the next number with .dev0"
    )


def changes(version: str) -> str:
    """The changelog's section for this version; nothing may be left under Unreleased."""
    sections = re.split(r"^## (.*)\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    titles, texts = sections[1::2], sections[2::2]
    bodies = {a.split()[0]: b.strip() for a, b in zip(titles, texts, strict=True)}
    if bodies.get("Unreleased"):
        fail(
            f"CHANGELOG.md has entries under Unreleased; move them under {version}, or set "
            "__version__ to a higher number if that one is released"
        )
    if not bodies.get(version):
        fail(f"CHANGELOG.md has no section {version}, which dsv4/__init__.py names")
    return bodies[version]


def build(version: str) -> Path:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-d", DIST)
    wheel = DIST / f"dsv4-{version}-py3-none-any.whl"
    archive = DIST / f"dsv4-{version}.tar.gz"
    for path in (wheel, archive):
        if not path.is_file():
            fail(f"the build made {[p.name for p in DIST.iterdir()]}, expected {path.name}")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        [info] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = packed.read(info).decode()
    tracked = set(run("git", "ls-files", "dsv4").split())
    if tracked != {name for name in names if name.startswith("dsv4/")}:
        fail("the wheel's files are not those of the commit; commit or remove what differs")
    if "Project-URL:" not in metadata:
        say("note: no [project.urls] in pyproject.toml; add them once there is a public address")
    return wheel


def install(wheel: Path, borrow: bool) -> Path:
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME / "venv", with_pip=not borrow)
    python = HOME / "venv" / "bin" / "python"
    if not borrow:
        run(python, "-m", "pip", "install", "-q", f"{wheel}[server,guided]", "mypy")
        return python
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    here = sysconfig.get_path("purelib")
    code = "import sys\nfrom dsv4.cli import main\nsys.argv[0] = 'dsv4'\nmain()\n"
    command = python.parent / "dsv4"
    command.write_text(f"#!{python}\n{code}")
    command.chmod(0o755)
    (site / "borrowed.pth").write_text(f"{here}\n")  # after this environment's own packages
    return python


def check_commands(python: Path, version: str, empty: Path) -> None:
    dsv4 = python.parent / "dsv4"
    where = run(python, "-c", "import dsv4; print(dsv4.__file__)", cwd=empty)
    if not where.startswith(str(HOME)):
        fail(f"{where.strip()} was imported, expected the installed wheel")
    for arguments, wanted in (
        (["--version"], f"dsv4 {version}"),
        (["generate", "-p", "What is the capital of France?", "--max-tokens", "64"], "Paris"),
        (["bench", "ops", "--predict", "b200", "--only", "wq_b"], "predicted, not run"),
        (["plan", "flash", "--memory", "180"], "180"),
        (["inspect", "tiny"], "modelopt-full"),
    ):
        say(f"dsv4 {' '.join(arguments)}")
        found = run(dsv4, *arguments, cwd=empty)
        if wanted not in found:
            fail(f"dsv4 {' '.join(arguments)} printed {found!r}, expected {wanted!r} in it")


def check_types(python: Path, empty: Path) -> None:
    """As in tests/test_package.py, but on the installed package, where `py.typed` matters."""
    say("mypy on tests/typed_client.py")
    client = empty / "client.py"
    shutil.copy(ROOT / "tests" / "typed_client.py", client)
    options = ["--strict", "--no-error-summary", "--no-pretty", "--ignore-missing-imports"]
    command = [str(python), "-m", "mypy", *options, client.name]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
    found = set(re.findall(r"^client\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M))
    lines = enumerate(client.read_text().splitlines(), start=1)
    marks = ((number, re.search(r"# E: ([\w-]+)$", line)) for number, line in lines)
    if found != {(str(number), mark[1]) for number, mark in marks if mark}:
        fail(f"types are not as marked in tests/typed_client.py:\n{done.stdout}{done.stderr}")


def check_server(python: Path, empty: Path) -> None:
    say("dsv4 serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python.parent / "dsv4"), "serve", "--port", str(port)]
    server = subprocess.Popen(command, cwd=empty, stdout=subprocess.DEVNULL)
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    try:
        limit = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > limit:
                    fail("dsv4 serve did not become ready")
                time.sleep(0.5)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps({**body, "temperature": 0}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).read()
    finally:
        server.terminate()
        server.wait(timeout=60)
    if "Paris" not in answer or b"<html" not in page:
        fail(f"the server answered {answer!r}, expected Paris and a page")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--borrow", action="store_true", help="other packages: this environment's")
    borrow = parser.parse_args().borrow
    version = read_version()
    refuse_development(version)
    text = changes(version)
    wheel = build(version)
    say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    python = install(wheel, borrow)
    empty = HOME / "empty"
    empty.mkdir()
    check_commands(python, version, empty)
    check_types(python, empty)
    check_server(python, empty)
    tag = HOME / "tag.txt"
    tag.write_text(f"dsv4 {version}\n\n{text}\n")
    say(f"dist holds dsv4 {version}, checked. The tag:")
    say(f"    git tag -a v{version} -F {tag.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
