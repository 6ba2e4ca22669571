"""How ranks begin: each reads its slices, all connect, each builds its part of the model."""

import hashlib
import logging
import shutil
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from dsv4 import __version__
from dsv4.checkpoint.rank_slices import selection
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.quantized import Weight
from dsv4.model.exchange import Exchange
from dsv4.model.transformer import Transformer
from dsv4.ops import engine_ops
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.team import Team
from dsv4.parallel.torch_comm import TorchComm
from dsv4.runner.load import (
    LoadedModel,
    Model,
    PreparedModel,
    load_model,
    prepare,
    read_weights,
    set_threads,
)
from dsv4.runner.settings import Settings
from dsv4.util.progress import Progress

log = logging.getLogger(__name__)

FOLLOWER = "dsv4.runner.ranks.follower"


def load_ranks(
    model: Model, choices: EngineConfig, progress: Progress | None = None
) -> LoadedModel:
    """`load_model`, on as many ranks as chosen."""
    prepared = model if isinstance(model, PreparedModel) else prepare(str(model), choices)
    if prepared.layout.world == 1:
        return load_model(prepared, choices, progress)
    return start_ranks(prepared, progress)


def start_ranks(prepared: PreparedModel, progress: Progress | None = None) -> LoadedModel:
    """Start the other ranks and load this one; all read at the same time."""
    begin = time.perf_counter()
    choices, settings, config = prepared.choices, prepared.settings, prepared.config
    layout = prepared.layout
    check_layout(prepared)
    folder, timeout = str(prepared.folder), choices.step_timeout
    meeting = tempfile.mkdtemp(prefix="dsv4-ranks-")  # only this user may enter
    # ranks are named before a server gives up
    team = Team(layout.world - 1, FOLLOWER, timeout / 2, layout.tp)
    try:
        store = str(Path(meeting) / "store")
        common = {
            "kind": "load",
            "folder": folder,
            "tp": layout.tp,
            "pp": layout.pp,
            "stages": [(stage.start, stage.stop) for stage in layout.stages],
            "settings": asdict(settings),
            "store": store,
            "timeout": timeout,
            "digest": digest(folder),
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        team.tell([{**common, "rank": rank} for rank in range(1, layout.world)])
        weights, _ = load_rank(folder, settings, layout, progress)
        team.wait_for("loaded")
        team.tell([{"kind": "connect"}] * (layout.world - 1))
        with team.together():
            model = connect(layout, config, weights, settings, store, timeout)
        team.wait_for("ready")
        team.ready()
    except BaseException:
        team.close()
        raise
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    log.info("%d ranks in %.1f s", layout.world, time.perf_counter() - begin)
    return LoadedModel(model, settings, prepared.folder, team)


def check_layout(prepared: PreparedModel) -> None:
    """Refuse what several ranks cannot do yet."""
    layout, settings = prepared.layout, prepared.settings
    if settings.device != "cpu":
        raise OptionError(
            f"tp is {layout.tp} and pp {layout.pp} on {settings.device}: several ranks run on "
            "CPUs only so far; use device=cpu, or tp=1 and pp=1"
        )
    if settings.prefix_disk is not None:
        raise OptionError("prefix_disk is not possible with several ranks yet; leave it out")
    if layout.tp > 1 and settings.activations["attention"] == "a4":
        raise OptionError("activations=a4 is not possible with tp above 1 yet; use a8 or a16")


def load_rank(
    folder: str, settings: Settings, layout: RankLayout, progress: Progress | None
) -> tuple[dict[str, Weight], ModelConfig]:
    config = ModelConfig.from_folder(Path(folder))
    set_threads(settings, config)
    checkpoint = open_checkpoint(Path(folder), config)
    with engine_ops(settings.ops).active():
        return read_weights(checkpoint, settings, selection(layout, config), progress), config


def connect(
    layout: RankLayout,
    config: ModelConfig,
    weights: dict[str, Weight],
    settings: Settings,
    store: str,
    timeout: float,
) -> Transformer:
    """Called by all ranks at once, when each has loaded, so none waits long."""
    distributed: Any = torch.distributed
    files = distributed.FileStore(store, layout.world)
    files.set_timeout(timedelta(seconds=max(30.0, timeout)))
    comm = TorchComm.gloo(layout, files, 2 * timeout)
    exchange = Exchange(layout, comm, config)
    return Transformer(config, weights, getattr(torch, settings.dtype), exchange)


def digest(folder: str) -> str:
    """Of what ranks must have in common: config and headers, and the code that runs them."""
    found = hashlib.blake2b(f"{__version__} {torch.__version__}".encode(), digest_size=16)
    found.update((Path(folder) / "config.json").read_bytes())
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            start = file.read(8)
            found.update(path.name.encode() + start)
            found.update(file.read(int.from_bytes(start, "little")))
    return found.hexdigest()
