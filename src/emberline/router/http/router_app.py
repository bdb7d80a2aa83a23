"""RouterApp: the router's HTTP endpoints. They serve the API for clients, calls of workers, status and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec

from emberline.api.openai import models
from emberline.cluster.membership import WorkerHealth
from emberline.cluster.registration import Heartbeat, RegistrationReply, WorkerRegistration
from emberline.core.clock import Clock
from emberline.core.config import RouterConfig
from emberline.core.errors import InvalidRequest, MethodNotAllowed, NotFound
from emberline.core.offload import LARGE_INPUT_BYTES, offload
from emberline.core.tls import TLSIdentity
from emberline.net.json_errors import JSON_DECODE_ERRORS
from emberline.router.destination import DESTINATION_HEADER, parse_endpoints
from emberline.router.http.dispatcher import Dispatcher
from emberline.router.http.expected_models import MAX_MODELS
from emberline.router.http.relay import Relay
from emberline.router.http.router_metrics import WorkerView, build_status
from emberline.router.http.stream_resumption import LAST_EVENT_ID_HEADER, StreamResumer
from emberline.router.http.worker_registry import TICK_INTERVAL_S
from emberline.router.http.worker_sleep import SLEEP_PATH, WorkerSleep
from emberline.router.request_summary import RequestSummary
from emberline.router.worker_client import WorkerClient
from emberline.server.access import AccessPolicy, derive_tenant_id
from emberline.server.exchange import Exchange, Receive, Scope, Send
from emberline.server.metrics import listener_families, render_exposition, tls_families
from emberline.server.pages import StaticPage
from emberline.server.route_table import HTTPRoute, RouteTable
from emberline.server.tracing import OPERATION_BY_PATH, RequestTracing

log = logging.getLogger("emberline.router")

PROXIED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                 "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize")  # fmt: skip
RESPONSES_PREFIX = "/v1/responses/"
# Below RESPONSES_PREFIX, after percent-decoding; no other path may be sent on with the workers' keys.
STORED_RESPONSE_PATH = re.compile(r"[A-Za-z0-9_-]{1,256}(?P<action>/input_items|/cancel)?")
STORED_RESPONSE_METHODS = {None: ("GET", "DELETE"), "/input_items": ("GET",), "/cancel": ("POST",)}
SESSION_HEADER = "x-session-affinity"
PAIRING_TIMEOUT_S = 1.0  # for workers to connect to a draining one, after two heartbeat intervals

Struct = TypeVar("Struct", bound=msgspec.Struct)
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class LeaveRequest(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    incarnation: str


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    on: bool = True
    move: bool = False  # move its streams to other workers


class SleepRequest(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    on: bool = True


class AnnouncedModels(msgspec.Struct, forbid_unknown_fields=True):
    """Models for which an autoscaler starts workers."""

    models: Annotated[tuple[ModelName, ...], msgspec.Meta(max_length=MAX_MODELS)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]  # for which they are expected, unless announced again


class RouterApp:
    def __init__(
        self,
        config: RouterConfig,
        client: WorkerClient,
        clock: Clock,
        pages: dict[str, StaticPage],
        tracing: RequestTracing | None = None,
        tls: TLSIdentity | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self.dispatcher = Dispatcher(config, clock)
        self._relay = Relay(self.dispatcher, client, config)
        self._stream_resumer = StreamResumer(self.dispatcher, client, config)
        self._worker_sleep = WorkerSleep(self.dispatcher, client, config.cluster_key)
        self._tracing = tracing
        self._tls = tls
        self._started_at = int(time.time())
        self._ready_at = clock.now()
        routes = {
            **{path: HTTPRoute(self._relay_request) for path in PROXIED_PATHS},
            **(
                {path: HTTPRoute(tracing.trace_handler(self._relay_request)) for path in OPERATION_BY_PATH}
                if tracing is not None
                else {}
            ),
            "/v1/models": HTTPRoute(self._list_models, "GET"),
            "/cluster/register": HTTPRoute(self._handle_registration, required_key="cluster"),
            "/cluster/beat": HTTPRoute(self._handle_heartbeat, required_key="cluster"),
            "/cluster/leave": HTTPRoute(self._handle_leave, required_key="cluster"),
            "/cluster/drain": HTTPRoute(self._handle_drain, required_key="cluster"),
            "/cluster/models": HTTPRoute(self._handle_announcement, required_key="cluster"),
            SLEEP_PATH: HTTPRoute(self._handle_sleep, required_key="cluster"),
            "/cluster/status": HTTPRoute(self._reply_with_status, "GET", "operator"),
            "/health": HTTPRoute(self._reply_with_readiness, "GET", "nothing"),
            "/health/live": HTTPRoute(self._reply_with_liveness, "GET", "nothing"),
            "/health/ready": HTTPRoute(self._reply_with_readiness, "GET", "nothing"),
            "/metrics": HTTPRoute(self._reply_with_metrics, "GET", "operator"),
        }
        hint = "GET /v1/models lists the models"
        access = AccessPolicy(config.api_keys, config.cluster_keys, tls=config.tls)
        self._routes = RouteTable(routes, HTTPRoute(self._show_model, "GET"), pages, access, hint)
        self._routes.prefix_routes[RESPONSES_PREFIX] = HTTPRoute(self._relay_stored_response_call, method="")

    async def check_workers_repeatedly(self) -> None:
        """Check the health of all workers every `TICK_INTERVAL_S` until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            try:
                self.dispatcher.check_workers()
            except Exception:
                log.exception("Health check of the workers failed")  # the next check tries again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        x = Exchange(scope, receive, send)
        try:
            await self._routes.handle(x)
        finally:
            log.debug(
                "Request: method=%s path=%s status=%s %s", x.method, x.path, x.logged_status or x.status, x.log_fields
            )

    # -- clients -------------------------------------------------------------------------------------------------------

    async def _relay_request(self, exchange: Exchange) -> None:
        body = await exchange.read_body(self._config.max_body)
        affinity = exchange.header(SESSION_HEADER), derive_tenant_id(exchange, with_key=bool(self._config.api_keys))
        summary = (
            RequestSummary.parse(body, *affinity)
            if len(body) < LARGE_INPUT_BYTES
            else await offload.run(len(body), RequestSummary.parse, body, *affinity)
        )
        if header := exchange.header(DESTINATION_HEADER):
            summary = replace(summary, endpoints=parse_endpoints(header))
        resumption = None
        if (last_event_id := exchange.header(LAST_EVENT_ID_HEADER)) and summary.stream:
            resumption = await self._stream_resumer.find_stream(exchange, summary, last_event_id, body)
            if resumption.is_complete:
                await exchange.start_event_stream()
                await exchange.send(last=True)
                return
        await exchange.run_while_connected(self._relay.run(exchange, summary, body, resumption))

    async def _relay_stored_response_call(self, exchange: Exchange) -> None:
        """Relay a request that reads or deletes a stored response to any worker.

        Any worker can answer: the workers of a router share one response store, or store no responses. Raises NotFound
        or MethodNotAllowed for all other paths below /v1/responses/, whatever a worker would make of them."""
        found = STORED_RESPONSE_PATH.fullmatch(exchange.path.removeprefix(RESPONSES_PREFIX))
        if found is None:
            raise NotFound(
                f"the path {exchange.path[:200]!r} does not exist",
                hint="use /v1/responses/ID, with /input_items or /cancel after it",
            )
        methods = STORED_RESPONSE_METHODS[found["action"]]
        if exchange.method not in methods:
            allowed = ", ".join(methods)
            raise MethodNotAllowed(
                f"{exchange.path[:200]} accepts {allowed}, not {exchange.method[:20]}", allowed=allowed
            )
        await exchange.read_body(0)
        await exchange.run_while_connected(self._relay.run(exchange, RequestSummary("", 0, False, None), b""))

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.reply_json(models.list_models(self._collect_served_models()))

    async def _show_model(self, exchange: Exchange) -> None:
        await exchange.reply_json(
            models.retrieve_model(self._collect_served_models(), exchange.path.removeprefix("/v1/models/"))
        )

    def _collect_served_models(self) -> list[models.ServedModel]:
        """Return the models of all workers that are not lost, and those for which an autoscaler starts workers.

        A model's context length is the smallest one among the workers that serve the model."""
        contexts: dict[str, int] = {}
        generating: set[str] = set()
        sampling: dict[str, dict[str, float]] = {}
        served = [
            model
            for _, member, health in self._worker_views()
            if health is not WorkerHealth.LOST
            for model in member.registration.models
        ]
        known = {model.name for model in served}
        announced = self.dispatcher.expected_models.list_announced(self._clock.now()).values()
        for model in (*served, *(each for each in announced if each.name not in known)):
            contexts[model.name] = min(contexts.get(model.name, model.max_context), model.max_context)
            sampling.setdefault(model.name, model.sampling)
            if model.max_running:  # 0 for an embedder
                generating.add(model.name)
        return [
            models.ServedModel(
                name,
                self._started_at,
                context,
                kind="chat" if name in generating else "embedding",
                sampling_defaults=sampling[name],
            )
            for name, context in sorted(contexts.items())
        ]

    # -- workers -------------------------------------------------------------------------------------------------------

    async def _handle_registration(self, exchange: Exchange) -> None:
        registration = await self._decode_body(exchange, WorkerRegistration)
        if self._config.tls_ca is not None and not registration.url.startswith("https://"):
            raise InvalidRequest(
                f"the worker's URL is {registration.url[:200]}; it must be an https URL, as the router has --tls-ca",
                param="url",
                hint="start the worker with --tls-cert, --tls-key and --tls-ca",
            )
        self.dispatcher.register(registration)
        await exchange.reply_json(self._build_registration_reply(registration.name))

    async def _handle_heartbeat(self, exchange: Exchange) -> None:
        heartbeat = await self._decode_body(exchange, Heartbeat)
        self.dispatcher.record_heartbeat(heartbeat)
        await exchange.reply_json(self._build_registration_reply(heartbeat.name))

    def _build_registration_reply(self, worker_name: str) -> RegistrationReply:
        worker = self.dispatcher.workers[worker_name]
        return RegistrationReply(
            self._config.beat_seconds,
            self.dispatcher.peers_by_model(worker_name),
            self.dispatcher.shared_routing.build_report(worker),
        )

    async def _handle_leave(self, exchange: Exchange) -> None:
        request = await self._decode_body(exchange, LeaveRequest)
        self.dispatcher.mark_leaving(request.name, request.incarnation)
        await exchange.reply_json({})

    async def _handle_drain(self, exchange: Exchange) -> None:
        request = await self._decode_body(exchange, DrainRequest)
        self.dispatcher.set_draining(request.name, request.on)
        if request.on and request.move:
            await self._wait_until_paired(request.name)
            self.dispatcher.set_draining(request.name, is_draining=True, move_streams=True)
        await exchange.reply_json({})

    async def _handle_announcement(self, exchange: Exchange) -> None:
        announcement, now = await self._decode_body(exchange, AnnouncedModels), self._clock.now()
        self.dispatcher.expected_models.announce(announcement.models, now + announcement.seconds, now)
        await exchange.reply_json({})

    async def _handle_sleep(self, exchange: Exchange) -> None:
        request = await self._decode_body(exchange, SleepRequest)
        await self._worker_sleep.set_asleep(request.name, request.on)
        await exchange.reply_json({})

    async def _wait_until_paired(self, worker_name: str) -> None:
        """Wait until other workers can fetch this worker's KV blocks, or until a time limit has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.beat_seconds * 2 + PAIRING_TIMEOUT_S):
                while not self.dispatcher.are_streams_ready_to_move_from(worker_name):
                    await asyncio.sleep(TICK_INTERVAL_S)

    async def _decode_body(self, exchange: Exchange, struct_type: type[Struct]) -> Struct:
        try:
            return msgspec.json.decode(await exchange.read_body(1 << 20), type=struct_type)
        except JSON_DECODE_ERRORS as e:
            raise InvalidRequest(f"the JSON body of {exchange.path} is not valid: {e}") from e

    # -- status --------------------------------------------------------------------------------------------------------

    def _worker_views(self) -> list[WorkerView]:
        views = []
        for worker in sorted(self.dispatcher.workers.values(), key=lambda worker: worker.name):
            member = self.dispatcher.membership.get(worker.name)
            assert member is not None
            views.append((worker, member, self.dispatcher.health(worker)))
        return views

    async def _reply_with_status(self, exchange: Exchange) -> None:
        body = build_status(self._worker_views(), self.dispatcher.metrics, self._clock.now(), self.dispatcher.kv_index)
        await exchange.reply_json(
            {
                **body,
                "open_requests": self.dispatcher.open_attempt_count,
                "waiting_requests": self._relay.waiting_requests.total,
                "waiting_by_model": self._relay.waiting_requests.by_model,
                "uptime_seconds": self._clock.now() - self._ready_at,
            }
        )

    async def _reply_with_liveness(self, exchange: Exchange) -> None:
        await exchange.reply_json({"status": "live"})

    async def _reply_with_readiness(self, exchange: Exchange) -> None:
        workers = {worker.name: health.value for worker, _, health in self._worker_views()}
        ready = "ready" in workers.values()
        body = {"status": "ready" if ready else "waiting for workers", "workers": workers}
        await exchange.reply_json(body, 200 if ready else 503)

    async def _reply_with_metrics(self, exchange: Exchange) -> None:
        families = self.dispatcher.metrics.metric_families(
            self._worker_views(), len(self.dispatcher.prefixes), self.dispatcher.kv_index
        )
        trace_families = self._tracing.families() if self._tracing is not None else ()
        text = render_exposition(
            [
                *families,
                self._routes.reply_counter.family(),
                self._routes.wrong_keys.family(),
                *trace_families,
                *tls_families(self._tls),
                *listener_families(),
            ]
        )
        await exchange.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
