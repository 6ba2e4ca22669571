"""Prometheus metrics, named like those of other servers, with our own prefix."""

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from dsv4.cache.geometry import SHARED_TOKENS

if TYPE_CHECKING:
    from dsv4.server.worker.link import RequestLink

log = logging.getLogger("dsv4.requests")

LAG_SECONDS = 0.05  # between two samples of the event loop
_PROCESS, _KEYS = secrets.token_hex(4), itertools.count()
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_SHORT = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.3, 1, 3, 10)
_TOKENS = tuple(4**power for power in range(11))


@dataclass
class RequestRecord:
    """One request for the log and the metrics; times in seconds of a monotonic clock."""

    id: str  # possibly chosen by the client
    path: str
    model: str
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0
    num_calls: int = 0
    num_malformed: int = 0
    finish: str = "abort"  # kept if the client disconnects
    begin: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    # unlike the id, unique, even across web processes of the same engine
    key: str = field(default_factory=lambda: f"{_PROCESS}r{next(_KEYS)}")


class EngineMetrics:
    """The engine's own metrics, read on request."""

    def __init__(self, labels: dict[str, str], link: "RequestLink") -> None:
        self._labels = labels
        self._link = link

    def collect(self) -> Iterable[Metric]:
        stats, names = self._link.stats, list(self._labels)
        values = list(self._labels.values())

        def figure(family: Callable[..., Any], name: str, text: str, value: float) -> Metric:
            metric = family(f"dsv4:{name}", text, labels=names)
            metric.add_metric(values, value)
            return metric  # type: ignore[no-any-return]

        gauge = functools.partial(figure, GaugeMetricFamily)
        counter = functools.partial(figure, CounterMetricFamily)
        yield gauge("engine_up", "1 while the engine answers", self._link.is_healthy)
        yield counter("engine_restarts", "Times the engine was restarted", self._link.num_restarts)
        if not stats:
            return
        total, used = sum(stats["pages_total"].values()), sum(stats["pages_used"].values())
        yield gauge("num_requests_running", "Running sequences", stats["num_running"])
        yield gauge("num_requests_waiting", "Waiting sequences", stats["num_waiting"])
        yield gauge("kv_cache_usage_perc", "Share of pages in use, 0 to 1", used / max(total, 1))
        yield gauge("last_step_seconds", "Duration of the last step", stats["last_step_s"])
        yield counter("num_preemptions", "Sequences set back", stats["num_preemptions"])
        fullest, every = stats.get("expert_pairs", (0, 0))
        if every:
            text = "Tokens times experts in decode steps over ranks, of one stage"
            yield counter("expert_pairs", text, every)
            text = "The same on the rank that has most, in each layer of each step"
            yield counter("expert_pairs_fullest_rank", text, fullest)
        fullest, every = stats.get("home_tokens", (0, 0))
        if every:
            yield counter("home_tokens", "Tokens computed with attention=dp, at all homes", every)
            text = "The same at the home that has most, in each step"
            yield counter("home_tokens_fullest", text, fullest)
        surprises = "Steps after ready that compiled a kernel or took more memory"
        yield counter("step_surprises", surprises, stats["num_surprises"])
        yield counter("prefix_cache_queries", "Tokens looked up", stats["num_prefix_asked"])
        yield counter("prefix_cache_hits", "Tokens found", stats["num_prefix_hit"])
        yield from self._drafts(counter, stats)
        yield counter("engine_steps", "Steps of the engine", stats["num_steps"])
        if "step_sizes" in stats:
            yield self._step_sizes(stats["step_sizes"])
        yield self._cache_config(total)
        yield from self._ranks(stats.get("ranks", ()))
        for kind in ("total", "used", "cached"):
            metric = GaugeMetricFamily(
                f"dsv4:pages_{kind}", f"Pages ({kind}) by pool", labels=[*names, "pool"]
            )
            for pool, count in stats[f"pages_{kind}"].items():
                metric.add_metric([*values, pool], count)
            yield metric

    def _ranks(self, ranks: Sequence[dict[str, float]]) -> Iterable[Metric]:
        names, values = [*self._labels, "rank", "node"], list(self._labels.values())
        for name, key, text in (
            ("rank_silent_seconds", "silent_s", "Since a rank was heard of"),
            ("rank_commands_behind", "behind", "Commands that a rank has not finished"),
        ):
            metric = GaugeMetricFamily(f"dsv4:{name}", text, labels=names)
            for rank in ranks:
                metric.add_metric([*values, str(rank["rank"]), str(rank["node"])], rank[key])
            if ranks:
                yield metric

    def _drafts(self, counter: Callable[..., Metric], stats: dict[str, Any]) -> Iterable[Metric]:
        """Under the names that vLLM uses."""
        if not stats.get("accepted_by_place"):
            return
        yield counter("spec_decode_num_drafts", "Times drafts were verified", stats["num_verified"])
        text = "Drafts that were verified"
        yield counter("spec_decode_num_draft_tokens", text, stats["num_drafted"])
        text = "Drafts that were right"
        yield counter("spec_decode_num_accepted_tokens", text, stats["num_accepted"])
        metric = CounterMetricFamily(
            "dsv4:spec_decode_num_accepted_tokens_per_pos",
            "The same by their place behind the newest token",
            labels=[*self._labels, "position"],
        )
        for place, count in enumerate(stats["accepted_by_place"]):
            metric.add_metric([*self._labels.values(), str(place)], count)
        yield metric

    def _step_sizes(self, sizes: dict[str, Any]) -> Metric:
        text, names = "Tokens computed in one step", list(self._labels)
        metric = HistogramMetricFamily("dsv4:iteration_tokens_total", text, labels=names)
        cumulative = list(itertools.accumulate(sizes["counts"]))
        bounds = [*(str(float(bound)) for bound in sizes["bounds"]), "+Inf"]
        buckets = list(zip(bounds, cumulative, strict=True))
        metric.add_metric(list(self._labels.values()), buckets, sizes["num_tokens"])
        return metric

    def _cache_config(self, num_pages: int) -> Metric:
        """The state's settings, as labels of a metric that is always 1."""
        facts, settings = self._link.facts, self._link.facts.get("settings", {})
        values = {
            **self._labels,
            "block_size": str(SHARED_TOKENS),
            "cache_dtype": str(settings.get("kv_format", "")),
            "index_dtype": str(settings.get("index_format", "")),
            "enable_prefix_caching": str(settings.get("prefix_cache", "")),
            "num_gpu_blocks": str(num_pages),
            "max_model_len": str(facts.get("max_context", "")),
            "max_num_seqs": str(facts.get("max_sequences", "")),
        }
        text = "What the state is kept in"
        metric = GaugeMetricFamily("dsv4:cache_config_info", text, labels=list(values))
        metric.add_metric(list(values.values()), 1.0)
        return metric


class Metrics:
    def __init__(self, model: str, link: "RequestLink") -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._registry.register(EngineMetrics(self._labels, link))
        self._success = self._counter("request_success", "Finished requests", "finished_reason")
        self._rejected = self._counter("request_rejected", "Refused requests", "status")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens not computed again")
        self._output = self._counter("generation_tokens", "Generated tokens").labels(**self._labels)
        self._reasoning = self._counter("reasoning_tokens", "Of them, reasoning")
        self._calls = self._counter("tool_calls", "Tool calls in answers")
        self._malformed = self._counter("malformed_outputs", "Answers with markup that is no call")
        self._first = self._histogram("time_to_first_token_seconds", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", _SHORT)
        self._per_token = self._histogram("request_time_per_output_token_seconds", _SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", _SECONDS)
        # the same as inter_token_latency_seconds, under the name of older dashboards
        self._per_output = self._histogram("time_per_output_token_seconds", _SHORT)
        self._prompt_size = self._histogram("request_prompt_tokens", _TOKENS)
        self._output_size = self._histogram("request_generation_tokens", _TOKENS)
        self._lag = self._histogram("event_loop_lag_seconds", _SHORT)
        errors = self._counter("request_errors", "Requests that the engine failed by name", "code")
        link.on_first_token = self._observe_first_token
        link.on_error = lambda code: errors.labels(**self._labels, code=code).inc()

    def _observe_first_token(self, waited_s: float, computed_s: float) -> None:
        self._queue.observe(waited_s)
        self._prefill.observe(computed_s)

    async def watch_loop(self) -> None:
        """Event loop lag: the delay that every connection sees at worst."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(LAG_SECONDS)
            self._lag.observe(max(time.monotonic() - begin - LAG_SECONDS, 0.0))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = [*self._labels, *labels]
        return Counter(f"dsv4:{name}", text, names, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ")
        made = Histogram(
            f"dsv4:{name}", text, list(self._labels), registry=self._registry, buckets=buckets
        )
        return made.labels(**self._labels)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def count_rejected(self, status: int) -> None:
        self._rejected.labels(**self._labels, status=str(status)).inc()

    def count_tokens(self, record: RequestRecord, count: int) -> None:
        """Call when tokens of an answer arrive."""
        now = time.monotonic()
        if record.first is None:
            record.first = now
            self._first.observe(now - record.begin)
        elif record.last is not None and count:
            gap = (now - record.last) / count  # mean over tokens that arrived together
            self._between.observe(gap)
            self._per_output.observe(gap)
        record.last = now
        record.num_output += count
        self._output.inc(count)

    def close(self, record: RequestRecord) -> None:
        """Log one line for the finished request and record its metrics."""
        now = time.monotonic()
        total = now - record.begin
        labels = self._labels
        self._success.labels(**labels, finished_reason=record.finish).inc()
        self._prompt.labels(**labels).inc(record.num_prompt)
        self._cached.labels(**labels).inc(record.num_cached)
        self._reasoning.labels(**labels).inc(record.num_reasoning)
        self._calls.labels(**labels).inc(record.num_calls)
        self._malformed.labels(**labels).inc(record.num_malformed)
        self._whole.observe(total)
        self._prompt_size.observe(record.num_prompt)
        self._output_size.observe(record.num_output)
        if record.first is not None and record.num_output > 1:
            self._decode.observe(now - record.first)
            self._per_token.observe((now - record.first) / (record.num_output - 1))
        first = "-" if record.first is None else f"{record.first - record.begin:.3f}s"
        log.info(
            "%s %s model=%s prompt=%d cached=%d reasoning=%d output=%d finish=%s first=%s"
            " total=%.3fs",
            record.id,
            record.path,
            record.model,
            record.num_prompt,
            record.num_cached,
            record.num_reasoning,
            record.num_output,
            record.finish,
            first,
            total,
        )
