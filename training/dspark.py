"""A small DSpark for the embedded model: draft blocks that guess five tokens at once.

    python -m training.dspark train               write dspark.safetensors beside this file
    python -m training.dspark assemble FOLDER     the embedded model with these blocks in FOLDER

The backbone is frozen: its streams and its distribution over conversations are computed once. The
stages begin as copies of the trained MTP block and learn the backbone's distribution of the five
tokens after an anchor, and the chance that a draft is right. One thread, fixed seeds and a fixed
number of steps: the same file on the same machine and build.
"""

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from dsv4.checkpoint.names import draft_parameters
from dsv4.checkpoint.reader import Checkpoint, open_checkpoint, open_draft
from dsv4.config import ModelConfig
from dsv4.testing import config_json
from dsv4.tools.formulas import angles, collapse, frequencies, head_weights, rms, rope
from dsv4.util.draft_shape import DSparkShape
from dsv4.util.models import model_folder
from training import rounding
from training.batches import Packer
from training.export import tensors as stored_tensors
from training.network import Network, Options, Result, linear
from training.shape import CONFIG, SEED

FILE = Path(__file__).parent / "dspark.safetensors"
NOISE_ID = 10  # a marker that conversations never hold
SHAPE = DSparkShape(block=5, noise_id=NOISE_ID, targets=(3, 4, 5), rank=32)
STAGES = 2
SPARK = replace(CONFIG, num_draft_layers=STAGES, draft_kind="dspark", dspark=SHAPE)
ROW, ROWS, ANCHORS, STEPS = 256, 256, 48, 600
RATE, ROUND_FROM = 3e-3, 0.7


@dataclass(frozen=True)
class Rows:
    """The frozen backbone's outputs for rows of conversations."""

    ids: Tensor  # [rows, length]
    taps: Tensor  # [rows, length, targets * size]
    hidden: Tensor  # [rows, length, size], before the head
    anchors: list[Tensor]  # of each row, positions after which an answer goes on


def dequantized(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found = {}
    for name, weight in checkpoint.stream(dtype=None, device="cpu"):
        wide = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
        found[name] = wide.float() if wide.is_floating_point() else wide
    return found


@torch.no_grad()
def backbone_rows(table: dict[str, Tensor], count: int, seed: int) -> Rows:
    network, batch = Network(CONFIG), Packer(seed).batch(ROW, count)
    ids = torch.from_numpy(batch.ids.astype("int64"))
    taps, hidden = [], []
    for at in range(0, count, 8):
        found = network.forward(table, ids[at : at + 8], Options(rounded=True), None)
        outputs = [found.layers[t].mean(1) for t in SHAPE.targets]
        taps.append(torch.cat(outputs, 1).view(-1, ROW, len(outputs) * CONFIG.hidden_size))
        hidden.append(found.hidden)
    is_answer = torch.from_numpy(batch.weights) >= 25
    anchors = []
    for row in is_answer:
        good = torch.nonzero(row[2 : ROW - SHAPE.block]).flatten()
        anchors.append(good[good > 0])
    return Rows(ids, torch.cat(taps), torch.cat(hidden), anchors)


def first_values(model: dict[str, Tensor], mtp: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stages as copies of the MTP block; the streams of the last target enter as they do there."""
    generator = torch.Generator().manual_seed(SEED)
    table = {}
    for name, parameter in draft_parameters(SPARK).items():
        like = "mtp.0." + name.split(".", 2)[2]
        if name.endswith("main_proj.weight"):
            earlier = torch.zeros(CONFIG.hidden_size, CONFIG.hidden_size)
            table[name] = torch.cat((earlier, earlier, mtp["mtp.0.h_proj.weight"]), 1)
        elif like in mtp:
            table[name] = mtp[like].clone()
        elif parameter.kind == "norm":
            table[name] = torch.ones(parameter.shape)
        elif name.endswith("markov_w1.weight"):
            table[name] = torch.randn(parameter.shape, generator=generator) * 0.5
        else:
            table[name] = torch.zeros(parameter.shape)
    return table


class Blocks:
    """Differentiable drafts from many anchors of one row."""

    def __init__(self, config: ModelConfig, model: dict[str, Tensor]) -> None:
        self.config, self.model, self.network = config, model, Network(config)
        self.table = frequencies(config, 0)

    def __call__(
        self, w: dict[str, Tensor], ids: Tensor, taps: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Row `ids`, `taps` `[length, ...]`, `anchors` `[count]`: positions p. Logits `[count, 5,
        vocabulary]` of the tokens from p + 2 on, given those before, and logits of the chances."""
        c, count, width = self.config, len(anchors), SHAPE.block
        z = rms(linear(taps, w["mtp.0.main_proj.weight"]), w["mtp.0.main_norm.weight"], 1e-6)
        rows = torch.full((count, width), NOISE_ID)
        rows[:, 0] = ids[anchors + 1]
        positions = anchors[:, None] + 1 + torch.arange(width)
        streams = F.embedding(rows.flatten(), self.model["embed.weight"])
        streams = streams.unsqueeze(1).expand(-1, c.hc_mult, -1)
        for stage in range(STAGES):
            streams = self._stage(w, f"mtp.{stage}.", streams, z, rows, anchors, positions)
        last = f"mtp.{STAGES - 1}."
        fn, base, scale = (w[f"{last}hc_head_{part}"] for part in ("fn", "base", "scale"))
        hidden = collapse(streams, head_weights(streams, fn, base, scale, c))
        logits = rms(hidden, w[last + "norm.weight"], 1e-6) @ self.model["head.weight"].T
        before = F.embedding(ids[positions], w[last + "markov_head.markov_w1.weight"])
        bias = before @ w[last + "markov_head.markov_w2.weight"].T
        both = torch.cat((hidden.view(count, width, -1), before), -1).detach()
        chances = both @ w[last + "confidence_head.proj.weight"][0]
        return logits.view(count, width, -1) + bias, chances

    def _stage(
        self, w: dict[str, Tensor], prefix: str, streams: Tensor, z: Tensor, rows: Tensor,
        anchors: Tensor, positions: Tensor,
    ) -> Tensor:  # fmt: skip
        network, options, result = self.network, Options(), Result(z, None, z.new_zeros(2))
        x, post, comb = network._collapse(w, prefix, "attn", streams, options)
        y = self._attention(w, prefix + "attn.", x, z, anchors, positions)
        streams = network.spread(streams, y, post, comb)
        x, post, comb = network._collapse(w, prefix, "ffn", streams, options)
        y = network._ffn(w, prefix + "ffn.", x, rows.flatten(), options, result)
        return network.spread(streams, y, post, comb)

    def _attention(
        self, w: dict[str, Tensor], prefix: str, x: Tensor, z: Tensor, anchors: Tensor,
        positions: Tensor,
    ) -> Tensor:  # fmt: skip
        c, count, width = self.config, len(anchors), SHAPE.block
        at = angles(positions.flatten(), self.table)

        def key(rows: Tensor, by: Tensor) -> Tensor:
            rows = rms(linear(rows, w[prefix + "wkv.weight"]), w[prefix + "kv_norm.weight"], 1e-6)
            return rounding.kv_round(rope(rows, by), c.rope_head_dim)

        context = key(z, angles(torch.arange(len(z)), self.table))
        own = key(x, at).view(count, width, -1)
        latent = rms(linear(x, w[prefix + "wq_a.weight"]), w[prefix + "q_norm.weight"], 1e-6)
        q = linear(latent, w[prefix + "wq_b.weight"]).view(-1, c.num_heads, c.head_dim)
        q = rope(rms(q, None, 1e-6), at).view(count, width, c.num_heads, -1)
        place, scale = torch.arange(len(z)), c.head_dim**-0.5
        seen = (place <= anchors[:, None]) & (place > anchors[:, None] - c.sliding_window)
        scores = torch.einsum("ajhd,sd->ajhs", q, context) * scale
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        inner = torch.einsum("ajhd,akd->ajhk", q, own) * scale
        sink = w[prefix + "attn_sink"].view(1, 1, -1, 1).expand(count, width, -1, 1)
        share = torch.cat((scores, inner, sink), -1).softmax(-1)
        n = len(z)
        out = torch.einsum("ajhs,sd->ajhd", share[..., :n], context)
        out = out + torch.einsum("ajhk,akd->ajhd", share[..., n : n + width], own)
        out = rope(out.flatten(0, 1), at, back=True).reshape(count * width, c.o_groups, -1)
        low = w[prefix + "wo_a.weight"].unflatten(0, (c.o_groups, -1))
        mixed = torch.einsum("tgk,grk->tgr", out, low).flatten(1)
        return linear(mixed, w[prefix + "wo_b.weight"])


def rounded(table: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as the file will hold them, with straight-through gradients."""
    kinds = draft_parameters(SPARK)
    return {
        name: rounding.nvfp4(value) if kinds[name].kind == "linear" else value
        for name, value in table.items()
    }


def losses(
    blocks: Blocks, w: dict[str, Tensor], rows: Rows, row: int, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, loss of the chances, and drafts that equal the backbone's likeliest token."""
    logits, chances = blocks(w, rows.ids[row], rows.taps[row], anchors)
    positions = anchors[:, None] + 1 + torch.arange(SHAPE.block)
    target = (rows.hidden[row][positions] @ blocks.model["head.weight"].T).softmax(-1)
    weights = torch.exp(-torch.arange(SHAPE.block) / SHAPE.block)
    cross = -(target * logits.log_softmax(-1)).sum(-1)
    same = torch.minimum(target, logits.softmax(-1).detach()).sum(-1).clamp(0, 1)
    chance = F.binary_cross_entropy_with_logits(chances, same)
    return (cross * weights).mean(), chance, logits.argmax(-1) == target.argmax(-1)


def train(steps: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    folder = model_folder("tiny")
    model = dequantized(open_checkpoint(folder, CONFIG))
    rows = backbone_rows(model, ROWS, SEED + 1)
    table = first_values(model, dequantized(open_draft(folder, CONFIG)))
    table = {name: value.requires_grad_(not name.endswith("gate.bias"))
             for name, value in table.items()}  # fmt: skip
    learnt = {name: value for name, value in table.items() if value.requires_grad}
    last = [learnt.pop(name) for name in list(learnt) if "confidence" in name]
    groups = [
        {"params": list(learnt.values()), "share": 1.0},
        {"params": last, "share": 0.01},  # it reads unnormalised rows
    ]
    optimizer = torch.optim.Adam(groups, lr=RATE, betas=(0.9, 0.98))
    blocks, right, begin = Blocks(SPARK, model), torch.zeros(SHAPE.block), time.perf_counter()
    good = [row for row in range(ROWS) if len(rows.anchors[row]) >= 8]
    for step in range(steps):
        progress = step / steps
        rate = RATE * min(1.0, step / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        row = good[int(torch.randint(len(good), ()))]
        some = rows.anchors[row]
        anchors = some[torch.randperm(len(some))[:ANCHORS]]
        w = rounded(table) if progress >= ROUND_FROM else table
        cross, chance, hits = losses(blocks, w, rows, row, anchors)
        optimizer.zero_grad()
        (cross + chance).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        optimizer.step()
        right += 0.05 * (hits.float().mean(0) - right)
        if step % 50 == 49:
            shares = " ".join(f"{float(x):.2f}" for x in right)
            seconds = time.perf_counter() - begin
            seen = f"loss {float(cross.detach()):.3f}, chances {float(chance.detach()):.3f}"
            sys.stdout.write(f"{step + 1} of {steps}, {seconds:.0f} s: {seen}, right {shares}\n")
            sys.stdout.flush()
    return {name: value.detach() for name, value in table.items()}


def assemble(folder: Path) -> Path:
    """A whole checkpoint: the embedded model with DSpark in place of its MTP block."""
    source = model_folder("tiny")
    folder.mkdir(parents=True, exist_ok=True)
    held = load_file(source / "model.safetensors")
    held = {name: tensor for name, tensor in held.items() if not name.startswith("mtp.")}
    save_file({**held, **load_file(FILE)}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config = {**config_json(SPARK), "quantization_config": config["quantization_config"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("train", "assemble"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    if args.what == "assemble":
        if args.folder is None:
            raise SystemExit("assemble needs a folder to write")
        assemble(args.folder)
        return
    trained = train(args.steps)
    out = stored_tensors(SPARK, trained, draft_parameters(SPARK))
    save_file(out, FILE, metadata={"format": "pt"})
    sys.stdout.write(f"{FILE.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
