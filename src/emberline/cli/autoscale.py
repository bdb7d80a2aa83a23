"""`emberline autoscale`: starts and removes workers of a router, so that latencies stay within an SLO."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emberline.cli import service
from emberline.cli.options import add_options, explicit_options
from emberline.cli.router_tls import add_router_tls_options, make_router_tls
from emberline.core.config import DEFAULT_MODEL, RouterConfig
from emberline.core.cpus import core_count
from emberline.core.errors import InvalidRequest
from emberline.core.keys import CLUSTER_KEY_VARIABLE, make_key_environment, read_cluster_keys
from emberline.core.router_urls import parse_router_urls
from emberline.core.slo import LatencyTargets

if TYPE_CHECKING:
    from emberline.autoscaler.fleet import WorkerFleet
    from emberline.autoscaler.settings import AutoscalerSettings

ADAPTERS = ("local", "kubernetes", "ray")
PLACEHOLDERS = ("{router}", "{role}", "{name}")
# Options, by their names in the parsed arguments, and the adapters that use them.
ADAPTERS_BY_OPTION = {
    "worker_command": ("local", "ray"),
    "options": ("local", "ray"),
    "keep_workers": ("local",),
    "logs": ("local",),
    "namespace": ("kubernetes",),
    "ray_address": ("ray",),
    "ray_cpus": ("ray",),
    "model": ("local", "ray"),
}
DESCRIPTIONS = {"options": "an option of workers", "model": "MODEL"}
RAY_CPUS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings

    default = RouterConfig()
    help_ = (
        f"Model of the workers that are started; comes after all options of this command. (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("model", nargs="?", help=help_)
    url = f"http://{default.host}:{default.port}"
    help_ = f"URL of the router; may be repeated, once for each router. (default: {url})"
    parser.add_argument("--router", metavar="URL", dest="routers", action="append", help=help_)
    parser.set_defaults(default_router=url)
    parser.add_argument(
        "--served-model",
        action="append",
        metavar="NAME",
        help="Name in the API of a model of the pools, whose requests wait while it has no worker; may be repeated."
        " (default: MODEL, or that of the workers' options; Kubernetes and --worker-command: as running workers say)",
    )
    parser.add_argument("--cluster-key", help="Cluster key of the router. (default: EMBERLINE_CLUSTER_KEY)")
    add_router_tls_options(parser)
    parser.add_argument("--slo", help="Limits of latencies, such as ttft_p90=500ms,itl_p90=50ms; must be given.")
    parser.add_argument(
        "--pool",
        action="append",
        metavar="ROLE[:KEY=VALUE,...]",
        help="Pool to scale: both, prefill or decode, with the keys min, max, gpus, capacity (tokens per second of a"
        " worker, weighted), sleep (workers to keep asleep), target (Kubernetes object); may be repeated. (default:"
        " both)",
    )
    parser.add_argument("--min", type=int, default=1, help="Minimum number of workers of a pool without min.")
    parser.add_argument("--max", type=int, default=8, help="Maximum number of workers of a pool without max.")
    parser.add_argument("--adapter", choices=ADAPTERS, default="local", help="Where workers are started.")
    example = AutoscalerSettings(LatencyTargets(1.0, 1.0), (PoolSettings("both"),))
    add_options(parser, example)
    parser.add_argument(
        "--worker-command",
        metavar="TEXT",
        help="Command that starts a worker, with {router}, {role} and {name}. (default: emberline worker MODEL ...)",
    )
    parser.add_argument("--keep-workers", action="store_true", help="Leave local workers running at Ctrl-C or SIGTERM.")
    parser.add_argument("--logs", type=Path, help="Directory for log files. (default: a new temporary directory)")
    parser.add_argument("--namespace", help="Namespace of the Kubernetes objects. (default: that of this pod)")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="Ray cluster. (default: the one of this machine)")
    parser.add_argument("--ray-cpus", type=float, help=f"CPUs that Ray reserves for a worker. (default: {RAY_CPUS:g})")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="Address of /metrics.")
    parser.add_argument("--metrics-port", type=int, help="Port of /metrics. (default: no metrics are served)")
    service.add_log_level_option(parser)
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="Options of every worker, as for emberline worker. (default: none)"
    )
    parser.set_defaults(own_options=frozenset(parser._option_string_actions))


def run(args: argparse.Namespace) -> int:
    service.configure_logging(args)
    settings = _build_settings(args)
    return service.run_service(_run(args, settings))


async def _run(args: argparse.Namespace, settings: AutoscalerSettings) -> None:
    from emberline.autoscaler.main import MetricsAddress, run_autoscaler
    from emberline.autoscaler.router_client import RouterClient
    from emberline.autoscaler.router_group import RouterGroup

    keys = read_cluster_keys(args.cluster_key)
    fleet = _build_fleet(args, settings, make_key_environment(keys, CLUSTER_KEY_VARIABLE))
    address = None if args.metrics_port is None else MetricsAddress(args.metrics_host, args.metrics_port)
    urls = _router_urls(args)
    tls = make_router_tls(args, urls)
    router = RouterGroup([RouterClient(url, keys[0] if keys else None, tls) for url in urls])
    models = args.served_model or _find_model_names(args)
    await run_autoscaler(settings, router, fleet, address, keep_workers=args.keep_workers, models=models)


def _find_model_names(args: argparse.Namespace) -> list[str]:
    """Return the API names of the models that workers will serve, or [] if the command line does not name them."""
    if args.adapter == "kubernetes" or args.worker_command is not None:
        return []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--served-name", default=_model(args))
    named, _ = parser.parse_known_args([word for word in args.options if word != "--"])
    return [named.served_name]


def _model(args: argparse.Namespace) -> str:
    return DEFAULT_MODEL if args.model is None else str(args.model)


def _build_settings(args: argparse.Namespace) -> AutoscalerSettings:
    from emberline.autoscaler.settings import AutoscalerSettings, PoolSettings

    _reject_misplaced_options(args)
    if args.slo is None:
        message = "--slo is missing: the autoscaler keeps latencies within it"
        raise InvalidRequest(message, param="slo", hint="write --slo ttft_p90=500ms,itl_p90=50ms")
    pools = tuple(PoolSettings.parse(text, args.min, args.max) for text in args.pool or ["both"])
    _reject_unused_options(args, [pool.role for pool in pools if pool.target])
    return AutoscalerSettings(LatencyTargets.parse(args.slo), pools, **explicit_options(args, AutoscalerSettings))


def _reject_misplaced_options(args: argparse.Namespace) -> None:
    """Raise InvalidRequest if an option of this command follows the model, where only workers' options may stand."""
    from emberline.cli import worker

    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    misplaced = args.own_options - parser._option_string_actions.keys()
    if wrong := next((word for word in args.options if word.partition("=")[0] in misplaced), ""):
        message = f"{wrong[:100]} comes after the model {_model(args)!r}, so every worker would get it"
        raise InvalidRequest(
            message, param="options", hint=f"write emberline autoscale {wrong[:100]} .. {_model(args)}"
        )


def _is_given(value: object) -> bool:
    return not (value is None or value is False or value == [])


def _reject_unused_options(args: argparse.Namespace, roles_with_target: Sequence[str]) -> None:
    """Raise InvalidRequest for an option that has no effect with the given --adapter or --worker-command.

    Also raise it if --ray-cpus is negative or not finite."""
    given = [name for name in ADAPTERS_BY_OPTION if _is_given(getattr(args, name))]
    unused = [name for name in given if args.adapter not in ADAPTERS_BY_OPTION[name]]
    if roles_with_target and args.adapter != "kubernetes":
        message = f"pool {roles_with_target[0]} has a target, but only --adapter kubernetes scales objects"
        raise InvalidRequest(message, param="pool", hint="drop target, or add --adapter kubernetes")
    if unused:
        what = DESCRIPTIONS.get(unused[0], f"--{unused[0].replace('_', '-')}")
        adapters = " or ".join(f"--adapter {each}" for each in ADAPTERS_BY_OPTION[unused[0]])
        message = f"{what} is set, but --adapter {args.adapter} does not use it"
        raise InvalidRequest(message, param=unused[0], hint=f"drop it, or use {adapters}")
    if args.worker_command is not None and args.options:
        message = f"worker_command is set, so the options {' '.join(args.options)[:200]!r} are not used"
        raise InvalidRequest(message, param="options", hint="write them into --worker-command")
    if args.worker_command is not None and args.model is not None:
        message = f"worker_command is set, so the model {args.model[:200]!r} is not used"
        raise InvalidRequest(
            message, param="model", hint="write it into --worker-command, and its name to --served-model"
        )
    if args.ray_cpus is not None and not 0 <= args.ray_cpus < math.inf:
        raise InvalidRequest(f"ray_cpus is {args.ray_cpus}; it must be at least 0", param="ray_cpus")


def _build_fleet(args: argparse.Namespace, settings: AutoscalerSettings, environment: dict[str, str]) -> WorkerFleet:
    roles = [pool.role for pool in settings.pools]
    if args.adapter == "kubernetes":
        from emberline.autoscaler.kubernetes_api import KubernetesAPI
        from emberline.autoscaler.kubernetes_fleet import KubernetesFleet

        targets = {pool.role: pool.target or f"deployment/{pool.role}" for pool in settings.pools}
        return KubernetesFleet(KubernetesAPI.from_environment(args.namespace or ""), targets)
    if args.adapter == "ray":
        from emberline.autoscaler.ray_fleet import RayFleet
        from emberline.engine.ranks.ray_launcher import connect_to_ray

        cpus = RAY_CPUS if args.ray_cpus is None else args.ray_cpus
        resources = {pool.role: {"num_cpus": cpus, "num_gpus": pool.gpus} for pool in settings.pools}
        ray = connect_to_ray(args.ray_address)
        command = _make_command_builder(args, settings, [])
        return RayFleet(ray, command, roles, environment=environment, resources_by_role=resources)
    from emberline.autoscaler.local_fleet import LocalFleet

    gpus = _find_gpus(args)
    logs = args.logs or Path(tempfile.mkdtemp(prefix="emberline-autoscale-"))
    logs.mkdir(parents=True, exist_ok=True)
    share = [] if gpus else _cpu_share(args, sum(pool.max_workers for pool in settings.pools))
    return LocalFleet(
        _make_command_builder(args, settings, share),
        roles,
        router_urls=_router_urls(args),
        log_dir=logs,
        environment=environment,
        gpus=gpus,
        gpus_by_role={pool.role: pool.gpus for pool in settings.pools},
    )


def _make_command_builder(
    args: argparse.Namespace, settings: AutoscalerSettings, more_options: Sequence[str]
) -> Callable[[str, str], list[str]]:
    """Return a function from role and name to the command line of a worker. Raises InvalidRequest."""
    sleeping_roles = {pool.role for pool in settings.pools if pool.sleep}
    if args.worker_command is None:
        options = [word for word in args.options if word != "--"]
        start = [sys.executable, "-m", "emberline.cli", "worker", _model(args)]
        words = [*start, "--router", "{router}", "--role", "{role}", "--worker-name", "{name}", *more_options, *options]
    else:
        words = _split_command(args.worker_command)
        if missing := [each for each in PLACEHOLDERS if each not in words]:
            message = (
                f"worker_command must have {', '.join(missing)} as a word of its own: {args.worker_command[:200]!r}"
            )
            raise InvalidRequest(message, param="worker_command")

    words = _insert_router_urls(words, _router_urls(args))

    def build_command(role: str, name: str) -> list[str]:
        values = {"{role}": role, "{name}": name}
        sleep_option = ["--can-sleep"] if role in sleeping_roles and args.worker_command is None else []
        return [*(values.get(word, word) for word in words), *sleep_option]

    return build_command


def _split_command(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as e:  # such as a quotation mark without its partner
        message = f"worker_command is {text[:200]!r}, which is no shell command: {e}"
        raise InvalidRequest(message, param="worker_command") from e


def _router_urls(args: argparse.Namespace) -> list[str]:
    return list(parse_router_urls(args.routers or [args.default_router]))


def _insert_router_urls(command: Sequence[str], urls: Sequence[str]) -> list[str]:
    """Return the command with {router} replaced by the URLs of all routers.

    If {router} follows an option, the option is repeated before each URL."""
    place = command.index("{router}")
    option = [command[place - 1]] if place and command[place - 1].startswith("-") else []
    repeated = [word for url in urls for word in (*option, url)]
    return [*command[: place - len(option)], *repeated, *command[place + 1 :]]


def _find_gpus(args: argparse.Namespace) -> list[str]:
    """Return the names of the GPUs that local workers may use: none if their options select a CPU or --threads."""
    from emberline.core.gpus import usable_gpus

    words = {word.split("=")[0] for word in args.options}
    wants_cpu = {"--threads", "--device"} & words and not {"cuda", "--device=cuda"} & {*args.options}
    return [] if args.worker_command or wants_cpu else [gpu.name for gpu in usable_gpus()]


def _cpu_share(args: argparse.Namespace, worker_count: int) -> list[str]:
    if any(word.startswith(("--threads", "--device")) for word in args.options):
        return []
    return ["--threads", str(max(1, core_count() // max(worker_count, 1))), "--device", "cpu"]
