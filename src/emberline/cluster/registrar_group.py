"""RegistrarGroup: registers a worker with each of its routers, and passes the routers' reports on to each other.

Routers do not know each other. A router's reply to a heartbeat reports the load that this router causes at the worker
and the prompts that it has sent. The worker's next heartbeats to the other routers contain that report. A router that
does not answer is left out, so that the load of a dead router does not count."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from emberline.cluster.registrar import PeersByModel, Registrar
from emberline.cluster.registration import Heartbeat, RouterReport, WorkerRegistration

MAX_UNSENT_PROMPTS = 1024  # prompts that wait to be sent to each router; the oldest are dropped


class RegistrarGroup:
    def __init__(
        self,
        router_urls: Sequence[str],
        cluster_key: str | None,
        registration: Callable[[], WorkerRegistration],
        heartbeat: Callable[[], Heartbeat],
        on_peers: Callable[[PeersByModel], None] = lambda peers: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`on_peers` is called after each reply of a router, with the peers that the routers list together.

        `tls`: the context for https routers; None: one with the system's CAs."""
        self._heartbeat = heartbeat
        self._on_peers = on_peers
        self._peers: list[PeersByModel] = [{} for _ in router_urls]  # the last list of each router
        self._reports: list[RouterReport | None] = [None for _ in router_urls]
        # Prompts that were not sent to the receiver yet, by receiver and by reporting router.
        self._unsent_prompts = [
            [deque[tuple[str, int]](maxlen=MAX_UNSENT_PROMPTS) for _ in router_urls] for _ in router_urls
        ]
        self.registrars = [
            self._make_registrar(i, url, cluster_key, registration, tls) for i, url in enumerate(router_urls)
        ]

    def start(self) -> None:
        for registrar in self.registrars:
            registrar.start()

    async def announce_shutdown(self) -> None:
        """Announce the worker's shutdown to all routers, so that none of them sends it new requests."""
        await asyncio.gather(*(registrar.announce_shutdown() for registrar in self.registrars))

    async def stop(self) -> None:
        await asyncio.gather(*(registrar.stop() for registrar in self.registrars))

    def _make_registrar(
        self,
        index: int,
        url: str,
        cluster_key: str | None,
        registration: Callable[[], WorkerRegistration],
        tls: ssl.SSLContext | None,
    ) -> Registrar:
        return Registrar(
            url,
            cluster_key,
            registration,
            lambda: self._build_heartbeat(index),
            lambda peers: self._update_peers(index, peers),
            tls,
            lambda report: self._store_report(index, report),
        )

    def _build_heartbeat(self, receiver: int) -> Heartbeat:
        heartbeat = self._heartbeat()
        if len(self.registrars) == 1:
            return heartbeat
        reports = []
        for i, report in enumerate(self._reports):
            if i != receiver and report is not None and self.registrars[i].is_registered:
                unsent = self._unsent_prompts[receiver][i]
                reports.append(msgspec.structs.replace(report, prompts=tuple(unsent)))
                unsent.clear()
        return msgspec.structs.replace(heartbeat, routers=len(self.registrars), reports=tuple(reports))

    def _store_report(self, reporter: int, report: RouterReport) -> None:
        self._reports[reporter] = report
        for receiver, unsent in enumerate(self._unsent_prompts):
            if receiver != reporter:
                unsent[reporter].extend(report.prompts)

    def _update_peers(self, router: int, peers: PeersByModel) -> None:
        """Store a router's list of peers, and call `on_peers` with the peers that any router lists.

        Lists of other routers that do not answer are left out, because they may be out of date."""
        self._peers[router] = peers
        merged: PeersByModel = {}
        for i, listed in enumerate(self._peers):
            if i != router and not self.registrars[i].is_registered:
                continue
            for model, engines in listed.items():
                known = merged.setdefault(model, [])
                known_ids = {engine.get("incarnation") for engine in known}
                known += [engine for engine in engines if engine.get("incarnation") not in known_ids]
        self._on_peers(merged)
