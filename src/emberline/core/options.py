"""Command line options of config fields, and access to the fields of nested configs by name.

Each setting is one field of one config class. `option` stores a help text beside the field's default, and the
command line is generated from both. `update_config` finds the nested config that defines a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from emberline.core.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
OPTION_KEY = "emberline_option"  # key of the OptionInfo in a field's metadata
COMPUTED_FIELD = {"emberline_computed": True}  # metadata of a config field that is no setting


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """The command line option of a config field."""

    help: str
    flag: str = ""  # empty: the field's name with dashes
    default_text: str = ""  # what --help shows as the default; empty: the default's value
    unit: str = ""  # unit of the value; "bytes" also accepts sizes such as 2G
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    is_repeatable: bool = False  # the option may be given several times, one value each


def option(default: Any, help_text: str, **info: Any) -> Any:
    """Return a dataclass field that is also a command line option. `info`: further fields of OptionInfo.

    If `default` is dataclasses.MISSING, the field is required."""
    metadata = {OPTION_KEY: OptionInfo(help_text, **info)}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def redefine_option(base_config: type[DataclassInstance], name: str, **changes: Any) -> Any:
    """Return the field `name` of a base config, changed for a subclass.

    `changes`: a new `default`, or new values of OptionInfo's fields."""
    inherited = next(each for each in fields(base_config) if each.name == name)
    default = changes.pop("default", inherited.default)
    return field(default=default, metadata={OPTION_KEY: replace(inherited.metadata[OPTION_KEY], **changes)})


def option_info(config_field: Field[Any]) -> OptionInfo | None:
    """Return the command line option of a config field; None if the field has no option."""
    info = config_field.metadata.get(OPTION_KEY)
    assert info is None or isinstance(info, OptionInfo)
    return info


@cache
def nested_config_classes(config_class: type[DataclassInstance]) -> dict[str, type[DataclassInstance]]:
    """Return the class of each field that holds a nested config, by field name."""
    hints = get_type_hints(config_class)
    return {each.name: hints[each.name] for each in fields(config_class) if is_dataclass(hints[each.name])}


@cache
def setting_owners(config_class: type[DataclassInstance]) -> dict[str, tuple[str, ...]]:
    """Return a dict from each setting's name to its owners: the configs that define the setting.

    An owner is the name of the field that holds the nested config, or "" for the config itself."""
    nested = nested_config_classes(config_class)
    owners: dict[str, tuple[str, ...]] = {
        each.name: ("",) for each in fields(config_class) if each.name not in nested and each.metadata != COMPUTED_FIELD
    }
    for holder, nested_class in nested.items():
        for each in fields(nested_class):
            owners[each.name] = (*owners.get(each.name, ()), holder)
    return owners


def update_config(config: ConfigT, settings: Mapping[str, Any]) -> ConfigT:
    """Return the config with changed settings, which may be fields of its nested configs.

    Raises InvalidRequest if no config defines a setting, or if several do."""
    owners = setting_owners(type(config))
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        found = owners.get(name, ())
        if not found:
            raise InvalidRequest(f"there is no setting {name!r}", param=name, hint=f"settings: {', '.join(owners)}")
        if len(found) > 1:
            message = f"the setting {name!r} is ambiguous: {' and '.join(found)} both define it"
            raise InvalidRequest(message, param=name, hint=f"change the field of {found[0]} itself")
        by_owner.setdefault(found[0], {})[name] = value
    own = by_owner.pop("", {})
    nested = {holder: replace(getattr(config, holder), **values) for holder, values in by_owner.items()}
    return replace(config, **own, **nested)
