"""Config classes: every setting is defined once, and flat settings reach the nested config that defines them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import msgspec
import pytest

from emberline.core.config import ServerConfig
from emberline.core.engine_config import DEPENDENT_SETTINGS, GPU_SCHEDULER_DEFAULTS, EngineConfig, SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.options import nested_config_classes, setting_owners, update_config
from emberline.core.transfer_config import TransferConfig

MODULES = ("config", "engine_config", "gateway_config")
# A setting of the same name in two classes, where both names are in use: the server loads the embedder, the gateway
# asks an engine for it.
SHARED_NAMES = {"embedder"}


def config_classes() -> list[type[Any]]:
    classes = []
    for name in MODULES:
        module = importlib.import_module(f"emberline.core.{name}")
        classes += [
            each
            for each in vars(module).values()
            if dataclasses.is_dataclass(each) and isinstance(each, type) and each.__module__ == module.__name__
        ]
    return classes


def test_no_field_is_defined_in_two_classes() -> None:
    owners: dict[str, type[Any]] = {}
    for config_class in config_classes():
        for name in inspect.get_annotations(config_class):
            first = owners.setdefault(name, config_class)
            is_changed_default = config_class is not first and issubclass(config_class, first)
            assert first is config_class or is_changed_default or name in SHARED_NAMES, (
                f"{name} is a field of {first.__name__} and of {config_class.__name__}"
            )
    assert len(owners) > 90


def test_every_engine_setting_has_one_owner() -> None:
    assert all(len(owners) == 1 for owners in setting_owners(EngineConfig).values())


def test_flat_settings_reach_nested_configs() -> None:
    config = EngineConfig.build("m", device="cpu", max_running=3, kv_memory=1 << 20, kv_port=7000, weights="plain")
    assert (config.model, config.device, config.scheduler.max_running) == ("m", "cpu", 3)
    assert (config.kv_cache.kv_memory, config.network.kv_port, config.gpu.weights) == (1 << 20, 7000, "plain")
    changed = config.with_settings(max_running=4, kv_host_memory=5)
    assert (changed.scheduler.max_running, changed.tiers.kv_host_memory, changed.kv_cache) == (4, 5, config.kv_cache)


def test_setting_of_none_gets_its_default() -> None:
    assert EngineConfig.build("m", max_running=None, kv_disk=None) == EngineConfig.build("m")


@pytest.mark.parametrize("name", ["max_num_seqs", "scheduler", "unset", ""])
def test_unknown_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"no setting '{name}'") as refused:
        EngineConfig.build("m", **{name: 1})
    assert refused.value.param == name and "max_running" in (refused.value.hint or "")


def test_ambiguous_setting_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Part:
        size: int = 1

    @dataclass(frozen=True)
    class Whole:
        left: Part = field(default_factory=Part)
        right: Part = field(default_factory=Part)

    assert get_type_hints(Whole, localns={"Part": Part})["left"] is Part
    Whole.__annotations__ = {"left": Part, "right": Part}
    with pytest.raises(InvalidRequest, match="'size' is ambiguous: left and right"):
        update_config(Whole(), {"size": 2})


def test_defaults_depend_on_the_device() -> None:
    config = EngineConfig.build("m", block_size=32)
    assert config.unset == DEPENDENT_SETTINGS - {"block_size"}
    assert config.scheduler == SchedulerConfig(block_size=32)
    gpu = config.with_gpu_defaults()
    assert gpu.scheduler.block_size == 32
    assert gpu.scheduler.max_running == GPU_SCHEDULER_DEFAULTS["max_running"]
    assert gpu.scheduler.max_batch_tokens == GPU_SCHEDULER_DEFAULTS["max_batch_tokens"]
    assert gpu.with_gpu_defaults() == gpu


def test_explicit_cpu_default_is_kept_on_a_gpu() -> None:
    cpu_default = SchedulerConfig().max_running
    assert EngineConfig.build("m", max_running=cpu_default).with_gpu_defaults().scheduler.max_running == cpu_default


def test_context_is_the_models_unless_it_is_set() -> None:
    assert EngineConfig.build("m").with_gpu_defaults().requested_context is None
    assert EngineConfig.build("m", max_context=77).with_gpu_defaults().requested_context == 77


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 2}, "threads is 2"),
        ({"block_size": 8}, "on a GPU it must be 16, 32 or 64"),
        ({"block_size": 12}, "multiple of 8"),
        ({"itl_target_ms": 0.0}, "itl_target_ms is 0.0"),
        ({"kv_tokens": 5, "kv_memory": 5}, "both set"),
        ({"weights": "half"}, "must be one of auto, plain, packed, both"),
        ({"device": "tpu"}, "must be one of auto, cpu, cuda"),
    ],
)
def test_invalid_gpu_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineConfig.build("m", **settings).with_gpu_defaults()


def test_config_survives_the_way_to_the_engine_process() -> None:
    config = EngineConfig.build("m", max_running=3, kv_host_memory=7, transfer=TransferConfig("w"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    "settings", [{"max_draft": 0}, {"max_draft": 32}, {"speculate": "eagle9"}, {"speculate": "mtp:DIR"}]
)
def test_invalid_speculation_settings_are_rejected_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        EngineConfig.build("m", **settings)
    assert refused.value.param == next(iter(settings))


def test_nested_configs_are_found_by_type() -> None:
    names = ["scheduler", "gpu", "speculation", "kv_cache", "tiers", "network", "parallel"]
    assert list(nested_config_classes(EngineConfig)) == names
    assert {each.name for each in fields(EngineConfig)} > set(nested_config_classes(EngineConfig))


def test_dashboard_is_a_web_address() -> None:
    assert ServerConfig(dashboard="https://gateway.example").dashboard == "https://gateway.example"
    with pytest.raises(InvalidRequest, match="must be an http or https URL") as refused:
        ServerConfig(dashboard="javascript:alert(1)")
    assert refused.value.param == "dashboard"
