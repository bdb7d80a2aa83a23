"""emberline router: one endpoint in front of workers, which register themselves."""

from __future__ import annotations

import argparse

from emberline.cli import service, tracing
from emberline.core.config import RouterConfig, cluster_key, secret
from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import Foreign

_SETTINGS = {
    "stuck_after": "seconds until a worker without progress is left",
    "lost_after": "seconds without a sign of life",
    "queue": "requests waiting at a worker, as a share of those it runs",
    "affinity_slack": "tokens of work by which a conversation may wait for its worker, at most (default: %(default)g)",
    "decode_weight": "a token to generate counts as so many of a prompt (default: %(default)g)",
    "split_tokens": "uncached tokens of a prompt that are worth a prefill worker (default: %(default)g; inf: never)",
    "split_patience": "seconds by which a prompt may be done later there",
    "ticket_timeout": "seconds to wait for a prefill worker, beyond what was expected",
    "migrations": "times a stream may go on at another worker",
    "migration_wait": "seconds a request waits for a worker to begin or to go on at, when those it met were away",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = RouterConfig()
    service.add_arguments(parser, default)
    parser.add_argument("--cluster-key", help="of workers (default: they may only be on this machine)")
    for name, help_ in _SETTINGS.items():
        service.add_setting(parser, default, name, help_)
    parser.add_argument(
        "--kv-events", action="store_true", help="follow what workers' caches hold, instead of inferring it"
    )
    parser.add_argument(
        "--foreign",
        action="append",
        default=[],
        metavar="KIND[:ROLE[:PORT]]=URL",
        help="a vLLM or SGLang server, as in vllm:decode=http://host:8000; may be given several times",
    )
    parser.add_argument(
        "--foreign-key-env",
        metavar="NAME",
        help="environment variable with the API key of these servers (default: they get the client's)",
    )
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)  # of cluster up
    tracing.add_arguments(parser)


def _foreign_key(name: str | None) -> str | None:
    if name is None:
        return None
    if not (found := secret(name)):
        raise InvalidRequest(f"the environment variable {name} is empty", param="foreign_key_env")
    return found


def run(args: argparse.Namespace) -> int:
    service.log(args)
    from emberline.server.routing.routing import route

    given = service.given(args, RouterConfig)
    given |= {
        "api_keys": tuple(args.api_key),
        "cluster_key": args.cluster_key or cluster_key(),
        "foreign": tuple(map(Foreign.parsed, args.foreign)),
        "foreign_key": _foreign_key(args.foreign_key_env),
        "trace": tracing.trace_config(args),
    }
    return service.run(route(RouterConfig(**given)))
