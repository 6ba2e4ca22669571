"""How ranks start: each reads its slices, all connect, each builds its part of the model."""

import importlib
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dsv4.cache.fingerprint import sampled_digest
from dsv4.checkpoint.rank_slices import selection
from dsv4.checkpoint.reader import open_checkpoint
from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import OptionError
from dsv4.formats.quantized import Weight
from dsv4.model.exchange import Exchange
from dsv4.model.transformer import Transformer
from dsv4.ops import engine_ops
from dsv4.parallel.comm import Comm
from dsv4.parallel.layout import RankLayout
from dsv4.parallel.team import RankFailed, Team
from dsv4.runner.load import (
    LoadedModel,
    Model,
    PreparedModel,
    load_model,
    prepare,
    read_weights,
)
from dsv4.runner.ranks import FOLLOWER
from dsv4.runner.ranks.devices import check_devices, choose_comm, device_of, open_comm
from dsv4.runner.ranks.rendezvous import (
    find_members,
    head_host,
    meeting_place,
    open_store,
    torchrun_connection,
    torchrun_place,
)
from dsv4.runner.ranks.versions import versions
from dsv4.runner.settings import Settings
from dsv4.util.models import BUILTIN_MODELS
from dsv4.util.progress import Progress

log = logging.getLogger(__name__)


def load_ranks(
    model: Model,
    choices: EngineConfig,
    progress: Progress | None = None,
    rank_failed: RankFailed | None = None,
) -> LoadedModel:
    """`load_model` on the chosen number of ranks. A torchrun process above rank 0 follows rank 0
    to the end and does not return."""
    follow_torchrun(choices.join_timeout)
    prepared = model if isinstance(model, PreparedModel) else prepare(str(model), choices)
    _check_nodes(prepared)
    if prepared.layout.world == 1:
        return load_model(prepared, choices, progress)
    return start_ranks(prepared, progress, rank_failed)


def start_ranks(
    prepared: PreparedModel,
    progress: Progress | None = None,
    rank_failed: RankFailed | None = None,
) -> LoadedModel:
    """Start the other ranks and load this one; all read in parallel."""
    begin = time.perf_counter()
    choices, layout = prepared.choices, prepared.layout
    check_layout(prepared)
    kind = choose_comm(choices.comm, prepared.settings, layout, choices.nodes)
    host = head_host(choices)
    members = find_members(choices, layout, FOLLOWER)
    team = Team(members, choices.step_timeout, layout.tp, rank_failed)
    try:
        with meeting_place(host) as store:
            model = _start_together(prepared, team, kind, store, host, progress)
    except BaseException as error:
        team.give_up(error)
        team.close()
        raise
    log.info("%d ranks in %.1f s", layout.world, time.perf_counter() - begin)
    return LoadedModel(model, prepared.settings, prepared.folder, team)


def _start_together(
    prepared: PreparedModel,
    team: Team,
    kind: str,
    store: str,
    host: str,
    progress: Progress | None,
) -> Transformer:
    choices, settings, config = prepared.choices, prepared.settings, prepared.config
    layout, folder, timeout = prepared.layout, prepared.folder, choices.step_timeout
    settings = replace(settings, device=device_of(settings.device, 0, 1))
    common = {
        "kind": "load",
        "tp": layout.tp,
        "pp": layout.pp,
        "stages": [(stage.start, stage.stop) for stage in layout.stages],
        "split_experts": layout.split_experts,
        "data_attention": layout.data_attention,
        "comm": kind,
        "store": store,
        "timeout": timeout,
        "digest": sampled_digest(folder),
        "versions": versions(settings.device),
        "log_level": logging.getLogger().getEffectiveLevel(),
    }
    each = layout.world // choices.nodes
    told = [
        {
            **common,
            "rank": rank,
            "settings": asdict(replace(settings, device=device_of(settings.device, rank, each))),
            "folder": member.model or _shared_name(prepared.folder),
            "address": member.address or host,
        }
        for rank, member in enumerate(team.members, 1)
    ]
    team.tell(told)

    def advance(done: int, total: int) -> None:
        team.check()  # another rank has failed: do not read the rest first
        if progress is not None:
            progress(done, total)

    weights, _ = load_rank(folder, settings, layout, advance)
    team.wait_for("loaded")
    team.tell([{"kind": "connect"}] * (layout.world - 1))
    with team.together():
        comm = team.unless_one_fails(
            lambda: connect(layout, config, settings, store, timeout, host, kind)
        )
        model = build(layout, comm, config, weights, settings)
    team.wait_for("connected")
    return model


def _check_nodes(prepared: PreparedModel) -> None:
    choices, layout = prepared.choices, prepared.layout
    if choices.nodes == 1 and choices.head is not None:
        raise OptionError(
            f"head is {choices.head}, nodes is 1; expected the number of machines with it"
        )
    if layout.world % choices.nodes:
        raise OptionError(
            f"tp {layout.tp} x pp {layout.pp} is {layout.world} ranks, nodes is {choices.nodes}; "
            "expected the same number of ranks on each: give tp and pp"
        )


def check_layout(prepared: PreparedModel) -> None:
    """Refuse what several ranks cannot do yet."""
    layout, settings = prepared.layout, prepared.settings
    check_devices(settings, layout, prepared.choices.nodes)
    if settings.prefix_disk is not None and layout.pp > 1:
        raise OptionError(
            f"prefix_disk is not possible with several stages (pp is {layout.pp}): rank 0 has the "
            "state of its own layers alone; leave it out or use tp"
        )
    if settings.prefix_disk is not None and layout.homes > 1:
        raise OptionError(
            "prefix_disk is not possible with attention=dp: rank 0 has the state of its own "
            "sequences alone; leave it out or use attention=tp"
        )


def load_rank(
    folder: Path, settings: Settings, layout: RankLayout, progress: Progress | None
) -> tuple[dict[str, Weight], ModelConfig]:
    config = ModelConfig.from_folder(folder)
    if settings.device != "cpu":
        torch.cuda.set_device(settings.device)
    checkpoint = open_checkpoint(folder, config)
    with engine_ops(settings.ops).active():
        return read_weights(checkpoint, settings, selection(layout, config), progress), config


def connect(
    layout: RankLayout,
    config: ModelConfig,
    settings: Settings,
    store: str,
    timeout: float,
    address: str,
    kind: str,
) -> Comm:
    """Called by all ranks together once each has loaded, so none waits long. `address`: this
    rank's, for the others; `kind`: from `choose_comm`."""
    if settings.device != "cpu":
        torch.cuda.set_device(settings.device)  # of this thread
    place = open_store(store, layout.world, timeout)
    return open_comm(kind, layout, config, settings, place, timeout, address)


def build(
    layout: RankLayout,
    comm: Comm,
    config: ModelConfig,
    weights: dict[str, Weight],
    settings: Settings,
) -> Transformer:
    exchange = Exchange(layout, comm, config)
    return Transformer(config, weights, getattr(torch, settings.dtype), exchange)


def follow_torchrun(timeout: float) -> None:
    """In a torchrun process above rank 0: follow rank 0, then exit."""
    place = torchrun_place()
    if place is not None and place[0] > 0:
        follower = importlib.import_module(FOLLOWER)
        connection = torchrun_connection(place[0], timeout)
        raise SystemExit(follower.main(connection, gone_code=0))  # torchrun sees how rank 0 ended


def _shared_name(folder: Path) -> str:
    """The name of an embedded model, whose path differs between nodes; otherwise the path."""
    return folder.name if folder.parent == BUILTIN_MODELS else str(folder)
