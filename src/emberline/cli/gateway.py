"""`emberline gateway`: serves many providers and the local engine behind one URL."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from emberline.cli import service
from emberline.cli.options import add_options, explicit_options
from emberline.core.config import read_secret
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.core.keys import ADMIN_KEY_VARIABLE, add_key_from_environment

SECRET_VARIABLES = {
    "store": "EMBERLINE_STORE_URL",
    "redis": "EMBERLINE_REDIS_URL",
    "engine_key": "EMBERLINE_ENGINE_KEY",  # an API key of the engine or router
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = ["serve", "rotate-keys"]
    parser.add_argument(
        "action",
        nargs="?",
        choices=actions,
        default="serve",
        help="Run the gateway, or re-encrypt the stored provider keys. (default: %(default)s)",
    )
    parser.add_argument("--forget-old", action="store_true", help="With rotate-keys: only delete old master keys.")
    parser.add_argument(
        "--config", type=Path, help="Settings file, gateway.toml. (default: the local engine as the only provider)"
    )
    add_options(parser, GatewayConfig())
    service.add_log_level_option(parser)


def run(args: argparse.Namespace) -> int:
    service.configure_logging(args)
    from emberline.gateway.settings_store import read_config_file

    file_settings = read_config_file(args.config) if args.config is not None else {}
    config = build_config(file_settings, args)
    if args.action == "rotate-keys":
        from emberline.cli.rotation import rotate_keys

        return rotate_keys(config, args.forget_old)
    from emberline.gateway.http.main import serve_gateway

    return service.run_service(serve_gateway(config, file_settings))


def build_config(file_settings: dict[str, Any], args: argparse.Namespace) -> GatewayConfig:
    """Return the settings from the gateway's settings file, overridden by the command line options."""
    known = {field.name: field for field in fields(GatewayConfig)}
    settings = {name: value for name, value in file_settings.items() if name != "gateways"}
    for name, value in settings.items():
        if name not in known:
            raise InvalidRequest(
                f"the settings file has an unknown setting {name!r}",
                param=name,
                hint=f"known settings: gateways, {', '.join(known)}",
            )
        default = getattr(GatewayConfig(), name)
        known_type = str if default is None else list if isinstance(default, tuple) else type(default)
        is_text_list = not isinstance(value, list) or all(isinstance(each, str) for each in value)
        if not (isinstance(value, known_type) and is_text_list):
            hint = "write a text in quotation marks" if default is None else f"for example {default!r}"
            shown = "a secret" if name in (*SECRET_VARIABLES, "api_keys") else repr(value)
            raise InvalidRequest(f"the setting {name} is {shown}, which has the wrong type", param=name, hint=hint)
        if isinstance(value, list):
            settings[name] = tuple(value)
    config, options = (
        GatewayConfig(**settings),
        _read_settings_from_environment() | explicit_options(args, GatewayConfig),
    )
    keys = *config.api_keys, *options.get("api_keys", ())
    options["api_keys"] = add_key_from_environment(keys, ADMIN_KEY_VARIABLE)
    return replace(config, **options)


def _read_settings_from_environment() -> dict[str, str]:
    """Return the settings with secrets whose environment variables are set: URLs with passwords, the engine's key."""
    found = {name: read_secret(variable) for name, variable in SECRET_VARIABLES.items()}
    return {name: value for name, value in found.items() if value}
