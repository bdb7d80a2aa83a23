"""`emberline router`: serves one URL in front of workers, which register themselves."""

from __future__ import annotations

import argparse

from emberline.cli import service, tracing
from emberline.core.config import RouterConfig, cluster_key_from_environment, read_secret
from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import ForeignWorkerConfig

_SETTINGS = {
    "stuck_after": "Seconds without an engine step after which a worker with requests counts as stuck.",
    "lost_after": "Seconds without a heartbeat after which a worker counts as lost.",
    "queue": "Requests that may wait at a worker, as a share of those it runs at the same time.",
    "affinity_slack": "Extra backlog in tokens at which the worker with a conversation's cache is still preferred."
    " (default: %(default)g)",
    "decode_weight": "Cost of a generated token, in prompt tokens. (default: %(default)g)",
    "split_tokens": "Uncached prompt tokens from which a prefill worker computes the prompt; inf: never."
    " (default: %(default)g)",
    "split_patience": "Seconds by which a prefill worker may finish the prompt later than the answering worker would.",
    "ticket_timeout": "Seconds to wait for a prefill worker beyond the expected time.",
    "migrations": "Times that another worker may continue a stream.",
    "migration_wait": "Seconds that a request waits for a worker to start or continue on when none is available.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = RouterConfig()
    service.add_arguments(parser, default)
    parser.add_argument(
        "--cluster-key",
        help="Key that workers and emberline drain must present."
        " (default: EMBERLINE_CLUSTER_KEY; without it, only this machine may call)",
    )
    for name, help_ in _SETTINGS.items():
        service.add_setting(parser, default, name, help_)
    parser.add_argument(
        "--kv-events",
        action="store_true",
        help="Route by the KV blocks that workers report, instead of inferring them.",
    )
    parser.add_argument(
        "--foreign",
        action="append",
        default=[],
        metavar="KIND[:ROLE[:PORT]]=URL",
        help="A vLLM or SGLang server to use, such as vllm:decode=http://host:8000; may be repeated. (default: none)",
    )
    parser.add_argument(
        "--foreign-key-env",
        metavar="NAME",
        help="Environment variable with the API key of --foreign servers. (default: the client's key is passed on)",
    )
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)  # set by emberline cluster up
    tracing.add_arguments(parser)


def _foreign_key(name: str | None) -> str | None:
    if name is None:
        return None
    if not (key := read_secret(name)):
        raise InvalidRequest(
            f"--foreign-key-env names the environment variable {name}, which is empty or not set",
            param="foreign_key_env",
            hint=f"export {name}=KEY",
        )
    return key


def run(args: argparse.Namespace) -> int:
    service.configure_logging(args)
    from emberline.router.http.main import run_router

    settings = service.config_options(args, RouterConfig)
    settings |= {
        "api_keys": tuple(args.api_key),
        "cluster_key": args.cluster_key or cluster_key_from_environment(),
        "foreign": tuple(map(ForeignWorkerConfig.parse, args.foreign)),
        "foreign_key": _foreign_key(args.foreign_key_env),
        "trace": tracing.trace_config(args),
    }
    return service.run_service(run_router(RouterConfig(**settings)))
