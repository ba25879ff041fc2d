"""What a server counts, as Prometheus reads it; every app has a registry of its own."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from braidlm.serving.models import ServedModels

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PER_TOKEN = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)


class Metrics:
    """Counters of one app."""

    def __init__(self, models: ServedModels):
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_Engines(models))
        self._requests = Counter(
            "braid_requests", "Requests by route and status", ("route", "status"), registry=self.registry
        )
        self._read = Counter("braid_prompt_tokens", "Tokens of prompts", ("model",), registry=self.registry)
        self._written = Counter("braid_generated_tokens", "Tokens generated", ("model",), registry=self.registry)
        self._first = Histogram(
            "braid_time_to_first_token_seconds", "From the request to its first token", ("model",), buckets=FIRST_TOKEN,
            registry=self.registry,
        )  # fmt: skip
        self._each = Histogram(
            "braid_time_per_token_seconds", "Between the tokens of a text, on average of those sent together",
            ("model",), buckets=PER_TOKEN, registry=self.registry,
        )  # fmt: skip
        self._of_models: dict[str, tuple[Any, ...]] = {}

    def count_request(self, route: str, status: int) -> None:
        """A request that has ended."""
        self._requests.labels(route, str(status)).inc()

    def count_prompts(self, model: str, tokens: int) -> None:
        """Tokens that are read."""
        self._read.labels(model).inc(tokens)

    def count_tokens(self, model: str, tokens: int, seconds: float, first: float | None) -> None:
        """New tokens, `seconds` after the ones before; `first` is how long the first of a text took."""
        if (known := self._of_models.get(model)) is None:  # looking labels up costs more than counting
            known = self._of_models[model] = tuple(m.labels(model) for m in (self._written, self._first, self._each))
        known[0].inc(tokens)
        if first is not None:
            known[1].observe(first)
        else:
            known[2].observe(seconds / tokens)

    def text(self) -> bytes:
        """The metrics as Prometheus reads them."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """The state of the engines at the time of asking."""

    def __init__(self, models: ServedModels):
        self.models = models

    def collect(self) -> Iterable[GaugeMetricFamily]:
        running = GaugeMetricFamily("braid_requests_running", "Texts that are being continued", labels=["model"])
        waiting = GaugeMetricFamily("braid_requests_waiting", "Texts that wait for a row", labels=["model"])
        free = GaugeMetricFamily("braid_rows_free", "Rows that no text uses", labels=["model"])
        for name, engine in self.models.engines.items():
            running.add_metric([name], engine.running)
            waiting.add_metric([name], engine.waiting)
            free.add_metric([name], engine.free)
        return (running, waiting, free)
