"""Damage checkpoints at random and see that every damage is refused or harmless.

    python scripts/fuzz_checkpoint.py --seconds 60 --seed 1

Small checkpoints of several layouts are written once. Each round changes one: bytes of a header,
its JSON, offsets, names, shapes, dtypes, the index, config.json, the length of a file, or values.
Then it is opened, loaded and checked. The round passes when

* loading raises a Dsv4Error, or
* loading succeeds and the result is sound: every parameter is there with its shape, all
  numbers are finite, and no change to a file's structure was swallowed.

Anything else is a failure: another exception, a process that dies, a round that takes too long, a
structural change that loads as if nothing had happened.
"""

import argparse
import copy
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from dsv4.checkpoint.names import parameters
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import ModelConfig
from dsv4.errors import Dsv4Error
from dsv4.tools.check import check_checkpoint
from tests.checkpoint import writers

LAYOUTS = ("official", "modelopt-experts", "compressed-tensors", "plain-transformers", "base")
ROUND_SECONDS = 20
INDEX = "model.safetensors.index.json"
ODD_NUMBERS = (0, 1, -1, 7, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 1.5, True, None, "x", [])
ODD_NAMES = (
    "",
    "..",
    "a/b",
    "\0",
    "norm.weight",
    "layers.1.ffn.gate.bias",
    "x" * 5000,
    "__metadata__",
)

Header = dict[str, Any]


class Folder:
    """A checkpoint on disk that can be restored after each round."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.layout = layout
        self.folder = writers.save(writers.made(layout), folder)
        self.pristine = {p.name: p.read_bytes() for p in self.folder.iterdir()}

    def restore(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in self.pristine:
                path.unlink()
        for name, data in self.pristine.items():
            path = self.folder / name
            if path.is_symlink() or not path.exists() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)

    def shard(self, rng: random.Random) -> Path:
        return rng.choice(sorted(self.folder.glob("*.safetensors")))


def split(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(path: Path, header: Header | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


# Each mutation returns True when the change is structural: it must then be refused.


def flip_header_bytes(target: Folder, rng: random.Random) -> bool:
    path = target.shard(rng)
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return False  # a flipped bit may hit a blank, or turn a name into an ignored one


def header_length(target: Folder, rng: random.Random) -> bool:
    path = target.shard(rng)
    data = path.read_bytes()
    old = int.from_bytes(data[:8], "little")
    new = rng.choice([0, 1, old - 1, old + 1, old * 2, 2**31, 2**63, 2**64 - 1])
    path.write_bytes(new.to_bytes(8, "little") + data[8:])
    return new != old


def header_entry(target: Folder, rng: random.Random) -> bool:
    """A number, dtype or offset of one entry becomes something odd."""
    path = target.shard(rng)
    header, data = split(path)
    name = rng.choice(sorted(header))
    entry = header[name]
    before = copy.deepcopy(entry)
    part = rng.choice(["dtype", "shape", "data_offsets", "drop", "extra"])
    if part == "dtype":
        entry["dtype"] = rng.choice(["F32", "BF16", "U8", "F8_E4M3", "F8_E8M0", "I64", "Z", 5])
    elif part == "drop":
        del entry[rng.choice(["dtype", "shape", "data_offsets"])]
    elif part == "extra":
        entry["code"] = 1
    elif entry[part]:
        entry[part][rng.randrange(len(entry[part]))] = rng.choice(ODD_NUMBERS)
    else:
        entry[part] = [rng.choice(ODD_NUMBERS)]
    join(path, header, data)
    renamed_bytes = {before["dtype"], entry.get("dtype")} <= {"U8", "I8", "F8_E8M0"}
    one = before["shape"] == [] and entry.get("shape") == [1]
    equal = json.dumps(entry) == json.dumps(before)
    return not (equal or renamed_bytes or one or name.startswith("mtp."))


def rename(target: Folder, rng: random.Random) -> bool:
    path = target.shard(rng)
    header, data = split(path)
    name = rng.choice(sorted(header))
    header = {rng.choice(ODD_NAMES) if n == name else n: e for n, e in header.items()}
    join(path, header, data)
    return True  # even a draft tensor's or an input_scale's name must agree with the index


def duplicate_key(target: Folder, rng: random.Random) -> bool:
    path = target.shard(rng)
    header, data = split(path)
    name = rng.choice(sorted(header))
    raw = json.dumps(header)
    join(path, (f'{{"{name}": {json.dumps(header[name])}, ' + raw[1:]).encode(), data)
    return True


def cut_or_grow(target: Folder, rng: random.Random) -> bool:
    path = target.shard(rng)
    data = path.read_bytes()
    if rng.random() < 0.7:
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        path.write_bytes(data + rng.randbytes(rng.randint(1, 64)))
    return True


def index_entry(target: Folder, rng: random.Random) -> bool:
    path = target.folder / INDEX
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    name = rng.choice(sorted(weight_map))
    kind = rng.choice(["nowhere", "outside", "drop", "type", "swap", "junk"])
    old = weight_map[name]
    if kind == "nowhere":
        weight_map[name] = "none.safetensors"
    elif kind == "outside":
        weight_map[name] = rng.choice(["../x.safetensors", "/dev/zero", "/etc/hostname", ".", ""])
    elif kind == "drop":
        del weight_map[name]
    elif kind == "type":
        weight_map[name] = rng.choice([1, None, [], {}])
    elif kind == "swap":
        weight_map[name] = next(f for f in weight_map.values() if f != old)
    text = json.dumps(index)
    path.write_text(text[: rng.randrange(len(text))] if kind == "junk" else text)
    return True


def folder_change(target: Folder, rng: random.Random) -> bool:
    path = target.shard(rng)
    kind = rng.choice(["gone", "empty", "link", "folder"])
    data = path.read_bytes()
    path.unlink()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "link":
        outside = target.folder.parent / "outside.safetensors"
        outside.write_bytes(data)
        path.symlink_to(outside)
    elif kind == "folder":
        path.symlink_to(target.folder)
    return True


def config_field(target: Folder, rng: random.Random) -> bool:
    path = target.folder / "config.json"
    config = json.loads(path.read_text())
    name = rng.choice(sorted(config))
    config[name] = rng.choice([*ODD_NUMBERS, {}, -5, 3, 4096])
    path.write_text(json.dumps(config))
    return False  # many fields have no bearing on the tensors


def quantization_field(target: Folder, rng: random.Random) -> bool:
    path = target.folder / "config.json"
    config = json.loads(path.read_text())
    quantization = config.get("quantization_config") or {}
    name = rng.choice([*quantization, "quant_method", "moe_quant_algo", "weight_block_size"])
    quantization[name] = rng.choice(["fp8", "modelopt", "NVFP4", "awq", [32, 32], [0, 0], 5, None])
    config["quantization_config"] = quantization
    path.write_text(json.dumps(config))
    return False


def values(target: Folder, rng: random.Random) -> bool:
    """Bytes of the data: loaded values must still be finite."""
    path = target.shard(rng)
    header, data = split(path)
    changed = bytearray(data)
    start, stop = header[rng.choice(sorted(header))]["data_offsets"]
    for _ in range(rng.choice([1, 8, 200])):
        if stop > start:
            changed[rng.randrange(start, stop)] = rng.choice([0, 0x7F, 0x80, 0xFF, 0x7E, 1])
    join(path, header, bytes(changed))
    return False


MUTATIONS: tuple[Callable[[Folder, random.Random], bool], ...] = (
    flip_header_bytes,
    header_length,
    header_entry,
    rename,
    duplicate_key,
    cut_or_grow,
    index_entry,
    folder_change,
    config_field,
    quantization_field,
    values,
)


def load_and_judge(folder: Path) -> str | None:
    """None when the load is sound; otherwise what is wrong with it."""
    config = ModelConfig.from_folder(folder)
    loaded = open_checkpoint(folder, config).load()
    expected = parameters(config)
    if loaded.keys() != expected.keys():
        return "parameters are missing or left over"
    for name, weight in loaded.items():
        if tuple(weight.shape) != expected[name].shape:
            return f"{name} has shape {tuple(weight.shape)}, expected {expected[name].shape}"
        if isinstance(weight, torch.Tensor):
            if not bool(torch.isfinite(weight.double()).all()):
                return f"{name} is not finite"
        elif bool(torch.isnan(weight.dequantize()).any()):
            return f"{name} dequantises to NaN"
    return None


def play(target: Folder, mutation: Callable[[Folder, random.Random], bool], seed: int) -> str:
    """One round: "refused", "loaded", or an AssertionError."""
    structural = mutation(target, random.Random(seed))
    try:
        problem = load_and_judge(target.folder)
        outcome = "loaded"
    except Dsv4Error as error:
        problem, outcome = None if str(error) else "an error without a message", "refused"
    assert problem is None, problem
    assert outcome == "refused" or not structural, "a structural change was swallowed"
    if seed % 4:
        return outcome  # the slower half of a round runs only now and then
    try:
        report = check_checkpoint(target.folder, values=True)
        assert outcome == "loaded" or not report.ok or mutation is config_field, (
            "`check` passes what the loader refuses"
        )
    except Dsv4Error:
        assert outcome == "refused", "`check` refuses what the loader takes"
    return outcome


def alarm(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"a round took more than {ROUND_SECONDS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, alarm)
    counts: Counter[str] = Counter()
    root = Path(tempfile.mkdtemp(prefix="fuzz-checkpoint-"))
    try:
        targets = [Folder(root / layout, layout) for layout in LAYOUTS]
        for target in targets:
            assert load_and_judge(target.folder) is None, target.layout
        rng = random.Random(arguments.seed)
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            target, mutation = rng.choice(targets), rng.choice(MUTATIONS)
            seed = rng.randrange(2**32)
            signal.alarm(ROUND_SECONDS)
            try:
                counts[f"{mutation.__name__} {play(target, mutation, seed)}"] += 1
            except Exception as error:
                where = f"{target.layout}, {mutation.__name__}, seed {seed}"
                sys.stderr.write(f"FAILED: {where}: {type(error).__name__}: {error}\n")
                raise
            finally:
                signal.alarm(0)
            target.restore()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{count:6d}  {name}\n")
    sys.stdout.write(f"{sum(counts.values())} rounds, nothing slipped through\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
