"""Metrics of a worker's registration with its routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emberline.cluster.registrar import Registrar
from emberline.server.metrics import MetricFamily


def build_router_metrics(registrars: Sequence[Registrar]) -> Iterator[MetricFamily]:
    for name, help_, kind, values in (
        (
            "emberline:router_registered",
            "Whether the router accepted the worker's last heartbeat.",
            "gauge",
            [int(each.is_registered) for each in registrars],
        ),
        (
            "emberline:router_heartbeat_failures_total",
            "Registrations and heartbeats that the router did not answer or did not accept.",
            "counter",
            [each.failure_count for each in registrars],
        ),
    ):
        labels = ['router="{}"'.format(each.router_url.replace('"', "%22")) for each in registrars]
        samples = zip(labels, values, strict=True)
        yield MetricFamily.from_samples(name, help_, kind, samples)
