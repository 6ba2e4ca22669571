"""The same traffic through `dsv4 serve`: a server in other processes, a low-overhead client.

Events are counted, not parsed: the server is measured, and the client must not become the
bottleneck on a machine with few cores.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import IO, Any
from urllib.parse import urlsplit

from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.request import Request
from dsv4.tools.speed.serving.traffic import (
    MAX_LOAD_S,
    Arrival,
    Load,
    LoadResult,
    Stream,
    Traffic,
    summarise,
    too_long,
)

START_S, STOP_S = 600.0, 60.0
LINE_BYTES = 1 << 20
PATH = "/v1/completions"


@dataclass(frozen=True)
class Share:
    """Median time per token of one load over HTTP, in the engine alone, and the difference."""

    load: dict[str, Any]
    http_token_ms: float
    engine_token_ms: float
    server_ms: float  # the server's share
    server_gap_ms: float  # the same from medians of single gaps


def server_share(engine: LoadResult, http: LoadResult) -> Share:
    if not (engine.token_ms and http.token_ms):
        raise OptionError(
            "no time per token: answers of one token, or all failed "
            f"({'; '.join(engine.errors + http.errors) or 'ask for more tokens out'})"
        )
    alone, over = engine.token_ms["p50"], http.token_ms["p50"]
    gap = http.gap_ms["p50"] - engine.gap_ms["p50"]
    return Share(engine.load, over, alone, round(over - alone, 3), round(gap, 3))


def bench_http(
    address: str, alone: Sequence[LoadResult], vocab_size: int, say: Callable[[str], None]
) -> Iterator[LoadResult | Share]:
    """Replay the engine's traffic over HTTP and report what the server adds."""
    traffic = Traffic(vocab_size)
    for before in alone:
        load = Load(**before.load)
        say(f"over HTTP: {load}")
        streams, seconds = replay_http(address, traffic.arrivals(load))
        result = summarise(load, "http", streams, seconds)
        yield result
        yield server_share(before, result)


def engine_flags(choices: Mapping[str, Any]) -> list[str]:
    """Engine options as command line flags; defaults are omitted."""
    flags = []
    for item in fields(EngineConfig):
        value = choices.get(item.name, item.default)
        name = item.name.replace("_", "-")
        if value == item.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


@contextmanager
def serving(model: str, choices: Mapping[str, Any], max_waiting: int) -> Iterator[str]:
    """The address of a server of this model on a free loopback port."""
    command = [sys.executable, "-m", "dsv4", "serve", model, "--port", "0"]
    command += ["--max-waiting", str(max_waiting), *engine_flags(choices)]
    env = {name: value for name, value in os.environ.items() if name != "DSV4_API_KEY"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL, env=env)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        is_over = process.poll() is not None
        text = os.pread(log.fileno(), LINE_BYTES, 0).decode("utf-8", "replace")
        found = re.search(r"ready: (http\S+)", text)
        if found:
            return found.group(1)
        if is_over:
            said = text.strip() or f"exit code {process.returncode}"
            raise OptionError(f"the server did not start: {said[-500:]}")
        time.sleep(0.05)
    raise OptionError(f"the server is not ready after {START_S:g} s; try `dsv4 serve` alone")


def replay_http(address: str, arrivals: Sequence[Arrival]) -> tuple[list[Stream], float]:
    """Like `serve.replay`, with one connection per request."""
    return asyncio.run(_replay(address, arrivals))


async def _replay(address: str, arrivals: Sequence[Arrival]) -> tuple[list[Stream], float]:
    host = urlsplit(address)
    assert host.hostname is not None
    assert host.port is not None
    begin = time.perf_counter()
    tasks = [_ask(host.hostname, host.port, arrival, begin) for arrival in arrivals]
    try:
        streams = await asyncio.wait_for(asyncio.gather(*tasks), MAX_LOAD_S)
    except TimeoutError:
        raise too_long() from None
    return streams, time.perf_counter() - begin


async def _ask(host: str, port: int, arrival: Arrival, begin: float) -> Stream:
    stream = Stream(arrival.time_s, len(arrival.request.prompt_ids))
    body = json.dumps(_body(arrival.request)).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await asyncio.sleep(begin + arrival.time_s - time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES)
        with closing(writer):
            writer.write(head.encode() + body)
            await _read(reader, stream, begin)
    except (OSError, EOFError, ValueError) as error:
        stream.error = f"the connection broke: {error!r}"
    if stream.num_tokens < arrival.request.params.max_tokens and stream.error is None:
        stream.error = f"{stream.num_tokens} of {arrival.request.params.max_tokens} tokens came"
    return stream


async def _read(reader: asyncio.StreamReader, stream: Stream, begin: float) -> None:
    status = (await reader.readline()).split()[1:]
    if not status:
        raise EOFError("closed without an answer")
    while (await reader.readline()).strip():
        pass
    if status[:1] != [b"200"]:
        text = (await reader.read(500)).decode("utf-8", "replace")
        stream.error = f"status {b' '.join(status).decode()}: {text}"
        return
    async for line in _lines(reader):
        _take(stream, line, time.perf_counter() - begin)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a chunked body."""
    rest = b""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        rest += await reader.readexactly(size)
        await reader.readline()
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line


def _take(stream: Stream, line: bytes, now: float) -> None:
    if not line.startswith(b"data: {"):
        return
    if b'"error"' in line[:20]:
        stream.error = str(json.loads(line[6:])["error"])
    elif b'"choices":[]' in line:
        usage = json.loads(line[6:])["usage"]
        stream.num_tokens = usage["completion_tokens"]
        stream.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    else:
        stream.times_s.append(now)


def _body(request: Request) -> dict[str, Any]:
    """The request as a client writes it; unset fields are left to the server."""
    params = request.params
    body: dict[str, Any] = {
        "prompt": list(request.prompt_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if params.presence_penalty:
        body["presence_penalty"] = params.presence_penalty
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body["logprobs"] = params.logprobs
    return body
