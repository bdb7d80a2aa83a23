"""Every field of config.json that is absent or null, compared with the config classes of transformers.

A config either means what it means to transformers, or is refused with an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from family_sizes import SIZES
from paged_model import Cache, assert_close, oracle, prompts
from random_checkpoints import randomise

from emberline.core.errors import ModelError
from emberline.models.config import ModelConfig
from emberline.models.loader import load_decoder
from emberline.models.registry import ARCHITECTURES

Config = dict[str, Any]
SHAPE_FIELDS = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
# Without these, only the text_config of a multimodal config.json is accepted. The number of experts has no default in
# the class of dots1.
REQUIRED_FIELDS = SHAPE_FIELDS | {"max_position_embeddings"}
WITHOUT_SIZES = {"gemma3_text", "llama4_text", "qwen3_5_text", "qwen3_5_moe_text"}


def fill_by_transformers(config: Config) -> Config:
    """Return the config with all fields of its class in transformers."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    filled: Config = auto.CONFIG_MAPPING[config["model_type"]].from_dict(config).to_dict()
    return {name: value for name, value in filled.items() if not name.startswith("_") and name != "eos_token_id"}


def list_class_fields(model_type: str) -> dict[str, Any]:
    """Return the fields of the class in transformers with their defaults."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    fields = dataclasses.fields(auto.CONFIG_MAPPING[model_type])
    return {f.name: f.default for f in fields if not f.name.startswith("_")}


def read(config: Config) -> ModelConfig | str:
    """Return the config as we read it, or the error."""
    try:
        return dataclasses.replace(ModelConfig.from_hf(config), eos=(), mtp_layers=0)
    except ModelError as error:
        return str(error)


def test_every_model_type_is_compared() -> None:
    assert SIZES.keys() == ARCHITECTURES.keys() - {"kimi_k2"}  # whose architecture is that of deepseek_v3
    assert ARCHITECTURES["kimi_k2"] is ARCHITECTURES["deepseek_v3"]


@pytest.mark.parametrize("model_type", SIZES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """Compare the table of defaults itself."""
    arch, theirs = ARCHITECTURES[model_type], list_class_fields(model_type)
    ours = arch.fill_defaults({})
    others = {"rope_theta", "partial_rotary_factor"}  # not fields of the class: see below
    read_fields = arch.read_fields() | (arch.experts.read_fields() if arch.experts else set())
    compared = (ours.keys() | read_fields | REQUIRED_FIELDS) & theirs.keys() - others
    for name in sorted(compared):
        is_required = name in REQUIRED_FIELDS and name not in ours
        expected = theirs[name]
        assert is_required or ours.get(name) == expected or (expected is None and not ours.get(name)), name
    assert model_type not in WITHOUT_SIZES or REQUIRED_FIELDS & theirs.keys() <= ours.keys()
    assert {"rms_norm_eps", "layer_norm_eps"} & compared and "tie_word_embeddings" in compared


@pytest.mark.parametrize("model_type", SIZES)
def test_absent_fields(model_type: str) -> None:
    sizes = SIZES[model_type]
    filled = fill_by_transformers(sizes)
    expected = read(filled)
    assert isinstance(expected, ModelConfig), expected
    assert read(sizes) == expected
    # The number of experts has two names, and transformers may write another than it read.
    experts = ARCHITECTURES[model_type].experts
    counts = set(experts.count_fields) if experts else set()
    for name in filled.keys() - sizes.keys() - counts - {"rope_parameters"}:
        assert read({key: value for key, value in filled.items() if key != name}) == expected, name
    # With latent attention, the number of KV heads is that of query heads.
    unused = {"num_key_value_heads"} if ARCHITECTURES[model_type].latent_attention else set()
    for name in sizes.keys() - unused - {"model_type"}:
        reduced = {key: value for key, value in sizes.items() if key != name}
        try:
            theirs = fill_by_transformers(reduced)
        except Exception:  # a size that does not match the others
            continue
        found = read(reduced)
        is_refused = isinstance(found, str) and (name in REQUIRED_FIELDS or not isinstance(read(theirs), ModelConfig))
        assert is_refused or found == read(theirs), name


@pytest.mark.parametrize("model_type", SIZES)
def test_null_fields(model_type: str) -> None:
    """What transformers refuses may mean anything here; otherwise null has its meaning there."""
    sizes, classes = SIZES[model_type], list_class_fields(model_type)
    for name, default in classes.items():
        null = sizes | {name: None}
        try:
            theirs = fill_by_transformers(null)
        except Exception:
            continue
        if type(default) is bool and theirs[name] is None:
            theirs[name] = False  # in an `if`
        assert read(null) == read(theirs), name


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: tuple[Config, ...] = (
    {},
    {"rope_theta": 777.0},
    {"rope_scaling": None, "rope_theta": 777.0},
    {"rope_scaling": {}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 777.0},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": None, "attention_factor": None, "truncate": False}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": None}},
    {"rope_parameters": None},
    {"rope_parameters": {}},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 555.0}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 555.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    {"rope_parameters": {"sliding_attention": {"rope_theta": 55.0}, "full_attention": {"rope_theta": 5.0}}},
    {"rope_local_base_freq": 55.0},
)


@pytest.mark.parametrize("model_type", SIZES)
def test_older_and_newer_forms_of_rope(model_type: str) -> None:
    """Each form means what transformers makes of it, or is refused."""
    compared = 0
    for form in ROPES:
        found = read(SIZES[model_type] | form)
        if isinstance(found, ModelConfig):
            try:
                theirs = fill_by_transformers(SIZES[model_type] | json.loads(json.dumps(form)))
            except Exception:  # it refuses them
                continue
            assert _with_meanings(theirs, found), form
            compared += 1
    assert compared >= 4


def _with_meanings(theirs: Config, found: ModelConfig) -> bool:
    ropes = theirs["rope_parameters"]
    for part in [ropes, *ropes.values()]:
        if isinstance(part, dict) and part.get("truncate", True) is None:
            part["truncate"] = False  # in an `if`
    return read(theirs) == found


# Its ramp is over several pairs of dimensions, so that truncate shows.
YARN_RAMP = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
CASES: dict[str, Config] = {
    "mixtral": SIZES["mixtral"],
    "gpt-oss": SIZES["gpt_oss"],
    "gpt-oss-null": SIZES["gpt_oss"] | {"rope_scaling": None, "rope_parameters": None},
    "deepseek-v3-null": SIZES["deepseek_v3"] | {"norm_topk_prob": None},
    "glm4-null": SIZES["glm4_moe"] | {"partial_rotary_factor": None},
    "yarn-null": SIZES["llama"] | {"rope_theta": 20.0, "rope_scaling": YARN_RAMP | {"truncate": None}},
    "qwen3-moe-windows": SIZES["qwen3_moe"] | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = CASES[name]
    filled = auto.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    randomise(transformers.AutoModelForCausalLM.from_config(filled)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompts(37, 20)
    assert_close(Cache(load_decoder(tmp_path), tokens, 1).run(1), oracle(tmp_path, tokens))
