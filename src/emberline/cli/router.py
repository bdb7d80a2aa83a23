"""`emberline router`: serves one URL in front of workers. The workers register themselves."""

from __future__ import annotations

import argparse

from emberline.cli import service
from emberline.cli.options import add_options, explicit_options
from emberline.core.config import RouterConfig, read_secret
from emberline.core.errors import InvalidRequest
from emberline.core.foreign_config import ForeignWorkerConfig
from emberline.core.keys import add_key_from_environment, read_cluster_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, RouterConfig())
    service.add_log_level_option(parser)
    parser.add_argument(
        "--foreign-key-env",
        metavar="NAME",
        help="Environment variable with the API key of --foreign servers. (default: the client's key is passed on)",
    )
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)  # set by emberline cluster up


def _read_foreign_worker_key(variable_name: str | None) -> str | None:
    if variable_name is None:
        return None
    if not (key := read_secret(variable_name)):
        raise InvalidRequest(
            f"--foreign-key-env names the environment variable {variable_name}, which is empty or not set",
            param="foreign_key_env",
            hint=f"export {variable_name}=KEY",
        )
    return key


def run(args: argparse.Namespace) -> int:
    service.configure_logging(args)
    from emberline.router.http.main import run_router

    given, cluster_keys = explicit_options(args, RouterConfig), read_cluster_keys(args.cluster_key)
    settings = given | {
        "api_keys": add_key_from_environment(given.get("api_keys", ())),
        "cluster_key": cluster_keys[0] if cluster_keys else None,
        "other_cluster_keys": cluster_keys[1:],
        "foreign": tuple(map(ForeignWorkerConfig.parse, args.foreign or ())),
        "foreign_key": _read_foreign_worker_key(args.foreign_key_env),
        "listen_fd": args.listen_fd,
    }
    return service.run_service(run_router(RouterConfig(**settings)))
