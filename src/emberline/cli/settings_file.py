"""Settings files: options of a command as YAML, such as `tp: 2`. Options on the command line have priority."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest

FLAG = "--config"


def add_settings_file_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG,
        dest="settings_file",
        type=Path,
        metavar="FILE",
        help="YAML file with options of this command by name, such as `tp: 2`; options on the command line have"
        " priority. (default: none)",
    )


def apply_settings_file(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: list[str], args: argparse.Namespace
) -> None:
    """Set options of `args` that the command line does not give to the values in `args.settings_file`.

    `args`: the command line `words`, parsed by `parser`, whose subparser is `command`. The subparser cannot be used
    afterwards. Raises InvalidRequest if the file is not usable."""
    settings = _parse_settings(command, args.settings_file)
    command._defaults.clear()
    for action in command._actions:
        action.default = argparse.SUPPRESS
    given = vars(parser.parse_args(words))  # only what the command line gives
    for name, value in settings.items():
        if name not in given:
            setattr(args, name, value)


def _parse_settings(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    """Return the settings of a file by their names in the parsed arguments."""
    settings = _read_file(file)
    words = [word for name, value in settings.items() for word in _to_words(parser, file, name, value)]
    parser.exit_on_error = False
    try:
        parsed = parser.parse_args(words)
    except argparse.ArgumentError as error:
        hint = "see the option's values in --help"
        raise InvalidRequest(f"{file}: {error}", param="config", hint=hint) from error
    finally:
        parser.exit_on_error = True
    names = {_find_action(parser, file, name).dest for name in settings}
    return {name: getattr(parsed, name) for name in names}


def _read_file(file: Path) -> dict[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        what = f"the settings file {file} cannot be read: {error}"
        raise InvalidRequest(what, param="config", hint="the file must exist and be valid YAML") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        what = f"the settings file {file} has no options by name, but a {type(settings).__name__}"
        raise InvalidRequest(what, param="config", hint="write one option per line, such as `tp: 2`")
    return settings


def _find_action(parser: argparse.ArgumentParser, file: Path, name: str) -> argparse.Action:
    flag = f"--{name.replace('_', '-')}"
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue  # it would print a text and end the program
        if flag != FLAG and (flag in action.option_strings or (not action.option_strings and action.dest == name)):
            return action
    raise InvalidRequest(
        f"{file}: there is no option {name!r} that a settings file can set",
        param="config",
        hint="use the names of the command line without their dashes, as in --help",
    )


def _to_words(parser: argparse.ArgumentParser, file: Path, name: str, value: Any) -> list[str]:
    """Return a setting of the file as command line arguments, so that the parser checks it like an option."""
    action = _find_action(parser, file, name)
    _check_has_value(file, name, value, is_flag=action.nargs == 0)
    if not action.option_strings:
        return [str(value)]
    flag = next(each for each in action.option_strings if each == f"--{name.replace('_', '-')}")
    if action.nargs == 0:
        if not isinstance(value, bool):
            message = f"{file}: the option {name!r} is {value!r}; it must be true or false"
            raise InvalidRequest(message, param="config")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else f"--no-{flag.removeprefix('--')}"]
        return [flag] if value else []
    if isinstance(value, dict):  # --models
        value = [f"{key}={each}" for key, each in value.items()]
    if isinstance(value, list):
        if isinstance(action, argparse._AppendAction):
            return [f"{flag}={each}" for each in value]
        value = ",".join(map(str, value))
    return [f"{flag}={value}"]


def _check_has_value(file: Path, name: str, value: Any, *, is_flag: bool) -> None:
    """Raise InvalidRequest if an option has no value, or one that YAML reads as true or false, such as `off`."""
    if value is None:
        message = f"{file}: the option {name!r} has no value"
        raise InvalidRequest(message, param="config", hint=f"write a value after `{name}:`, or drop the line")
    if isinstance(value, bool) and not is_flag:
        message = f"{file}: the option {name!r} is {str(value).lower()}, which is no value of it"
        hint = 'quote words that YAML reads as true or false, such as "off", "on", "no" and "yes"'
        raise InvalidRequest(message, param="config", hint=hint)
