"""Command line options that are generated from the fields of config classes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from emberline.core.options import OptionInfo, nested_config_classes, option_info

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIZE_FACTORS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_options(
    parser: argparse.ArgumentParser,
    config: DataclassInstance,
    names: Iterable[str] | None = None,
    help_texts: Mapping[str, str] | None = None,
    parse_int: Callable[[str], int] = int,
) -> None:
    """Add the command line options of a config and of its nested configs.

    The help shows the values of `config` as defaults. An option that is not given is None in the parsed arguments.

    `names`: add only the options of these fields. `help_texts`: texts that replace the fields' help texts, by field
    name. `parse_int`: the parser for integer options."""
    wanted = None if names is None else set(names)
    hints = get_type_hints(type(config))
    nested = nested_config_classes(type(config))
    for each in fields(config):
        if each.name in nested:
            add_options(parser, getattr(config, each.name), wanted, help_texts, parse_int)
        elif (info := option_info(each)) is not None and (wanted is None or each.name in wanted):
            text = (help_texts or {}).get(each.name, info.help)
            default = getattr(config, each.name)
            help_ = f"{text} (default: {_format_default(info, default)})"
            parsing = _add_argument_kwargs(info, default, hints[each.name])
            if parsing.get("type") is int:
                parsing["type"] = parse_int
            parser.add_argument(option_flag(each), dest=each.name, help=help_, **parsing)


def option_flag(config_field: Field[Any]) -> str:
    """Return the command line option of a config field, such as --max-running."""
    info = option_info(config_field)
    assert info is not None
    return info.flag or f"--{config_field.name.replace('_', '-')}"


def explicit_options(args: argparse.Namespace, config_class: type[DataclassInstance]) -> dict[str, Any]:
    """Return the settings given on the command line that are fields of a config or of its nested configs."""
    given: dict[str, Any] = {}
    nested = nested_config_classes(config_class)
    for each in fields(config_class):
        if each.name in nested:
            given |= explicit_options(args, nested[each.name])
        elif option_info(each) is not None and (value := getattr(args, each.name, None)) is not None:
            given[each.name] = tuple(value) if isinstance(value, list) else value
    return given


def _add_argument_kwargs(option: OptionInfo, default: Any, type_hint: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` that define how the option's value is parsed."""
    kind, is_optional = _split_optional_hint(type_hint)
    if kind is bool:
        if is_optional:
            return {"action": argparse.BooleanOptionalAction, "default": None}
        return {"action": "store_const", "const": not default}
    shown = {"choices": option.choices} if option.choices else {"metavar": option.metavar}
    if get_origin(kind) is tuple:
        return shown | ({"action": "append"} if option.is_repeatable else {"type": parse_comma_list})
    if option.unit == "bytes":
        return shown | {"type": parse_size}
    return shown | {"type": str if get_origin(kind) is Literal else kind}


def _split_optional_hint(type_hint: Any) -> tuple[Any, bool]:
    """Return a type hint without `| None`, and whether the hint allowed None."""
    if get_origin(type_hint) not in (Union, UnionType):
        return type_hint, False
    (kind,) = (each for each in get_args(type_hint) if each is not NoneType)
    return kind, True


def _format_default(info: OptionInfo, default: Any) -> str:
    if info.default_text:
        return info.default_text
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if info.unit == "bytes":
        return format_size(default)
    unit = f" {info.unit}" if info.unit and default != float("inf") else ""
    return f"{default:g}{unit}" if isinstance(default, float) else f"{default}{unit}"


def parse_comma_list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def parse_size(text: str) -> int:
    """Parse a size in bytes, such as 500M or 1.5G. Raises ArgumentTypeError for any other text."""
    factor = SIZE_FACTORS.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = -1.0
    if not 0 <= number < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes (hint: write 500M or 1.5G)")
    return int(number)


def format_size(byte_count: int) -> str:
    """Return a number of bytes in the form that `parse_size` reads, such as 256M."""
    for letter, factor in reversed(SIZE_FACTORS.items()):
        if byte_count and byte_count % factor == 0:
            return f"{byte_count // factor}{letter.upper()}"
    return str(byte_count)
