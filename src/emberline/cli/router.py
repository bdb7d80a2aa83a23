"""emberline router: one endpoint in front of workers, which register themselves."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from emberline.core.config import Foreign, RouterConfig, cluster_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = RouterConfig()
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=default.port)
    parser.add_argument("--api-key", action="append", default=[], help="require this key; may be given several times")
    parser.add_argument("--cluster-key", help="of workers (default: they may only be on this machine)")
    parser.add_argument("--request-timeout", type=float, default=default.request_timeout, help="seconds")
    parser.add_argument(
        "--stuck-after", type=float, default=default.stuck_after, help="seconds until a worker without progress is left"
    )
    parser.add_argument("--lost-after", type=float, default=default.lost_after, help="seconds without a sign of life")
    parser.add_argument(
        "--queue", type=float, default=default.queue, help="requests waiting at a worker, as a share of those it runs"
    )
    parser.add_argument(
        "--affinity-slack",
        type=float,
        default=default.affinity_slack,
        help="tokens of work by which a conversation's worker may be behind the others (default: %(default)g)",
    )
    parser.add_argument(
        "--decode-weight",
        type=float,
        default=default.decode_weight,
        help="a token to generate counts as so many of a prompt (default: %(default)g)",
    )
    parser.add_argument(
        "--kv-events", action="store_true", help="follow what workers' caches hold, instead of inferring it"
    )
    parser.add_argument(
        "--split-tokens",
        type=float,
        default=default.split_tokens,
        help="uncached tokens of a prompt that are worth a prefill worker (default: %(default)g; inf: never)",
    )
    parser.add_argument(
        "--ticket-timeout", type=float, default=default.ticket_timeout, help="seconds to wait for a prefill worker"
    )
    parser.add_argument(
        "--migrations", type=int, default=default.migrations, help="times a stream may go on at another worker"
    )
    parser.add_argument(
        "--migration-wait",
        type=float,
        default=default.migration_wait,
        help="seconds a stream waits for a worker to go on at",
    )
    parser.add_argument(
        "--foreign",
        action="append",
        default=[],
        metavar="KIND[:ROLE[:PORT]]=URL",
        help="a vLLM or SGLang server, as in vllm:decode=http://host:8000; may be given several times",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    import uvloop

    from emberline.server.routing.routing import route

    config = RouterConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key),
        cluster_key=args.cluster_key or cluster_key(),
        request_timeout=args.request_timeout,
        stuck_after=args.stuck_after,
        lost_after=args.lost_after,
        queue=args.queue,
        affinity_slack=args.affinity_slack,
        decode_weight=args.decode_weight,
        kv_events=args.kv_events,
        split_tokens=args.split_tokens,
        ticket_timeout=args.ticket_timeout,
        migrations=args.migrations,
        migration_wait=args.migration_wait,
        foreign=tuple(map(Foreign.parsed, args.foreign)),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(route(config))
    return 0
