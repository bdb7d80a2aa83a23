"""read_weight_formats: how the weights of each kind are stored, from the quantization_config of a config.json.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.linear_regex import MAX_PATTERN_CHARS, compile_linear_regex
from emberline.models.fields import ConfigFields
from emberline.models.outline import ModelOutline
from emberline.models.weight_parts import WeightKind

MXFP4_BITS, MXFP4_GROUP, MXFP4_SCALE_BITS = 4, 32, 8
FP8_BITS = 8
MAX_GROUP = 1 << 16  # of weights with one scale; larger sizes are rejected as damaged or malicious
INT_SCALE_BITS, FP8_SCALE_BITS = 16, 32  # scales of integers are bf16, those of fp8 float32
QUANTISABLE_KINDS: tuple[WeightKind, ...] = ("attention", "dense ffn", "routed experts", "shared experts", "head")
MODULES: Mapping[WeightKind, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    "dense ffn": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "routed experts": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
    "shared experts": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.down_proj"),
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantised matrices: a number of bits for each weight, and a scale for each group of weights."""

    name: str
    bits: int
    group_rows: int  # weights that share a scale: rows, and columns; 0: the whole row or column
    group_columns: int
    scale_bits: int

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix with its scales."""
        groups = -(-rows // (self.group_rows or rows)) * -(-columns // (self.group_columns or columns))
        return -(-rows * columns * self.bits // 8) + -(-groups * self.scale_bits // 8)


def read_weight_formats(config: Mapping[str, Any], outline: ModelOutline) -> dict[WeightKind, WeightFormat]:
    """Return the format of each kind of weights that is quantised. `config`: that of the language model.

    Raises UnsupportedModel for a format that cannot be planned, or that only some matrices of a kind have."""
    fields = ConfigFields(config, "config.json")
    if not fields.has_field("quantization_config"):
        return {}
    section = fields.section("quantization_config")
    wanted = read_weight_format(section)
    match section.text("quant_method"):
        case "mxfp4":
            kept = section.text_list("modules_to_not_convert")
            return {} if _is_kept("routed experts", kept, outline) else {"routed experts": wanted}
        case "fp8":
            kept = ("lm_head", *section.text_list("modules_to_not_convert"))
        case _:
            kept = section.text_list("ignore")
    return {kind: wanted for kind in QUANTISABLE_KINDS if not _is_kept(kind, kept, outline)}


def read_weight_format(section: ConfigFields) -> WeightFormat:
    """Return the format of quantised matrices. `section`: quantization_config. Raises UnsupportedModel."""
    method = section.text("quant_method")
    if method == "mxfp4":
        return WeightFormat("mxfp4", MXFP4_BITS, 1, MXFP4_GROUP, MXFP4_SCALE_BITS)
    if method == "fp8":
        block = section.number_list("weight_block_size", 2) if section.has_field("weight_block_size") else (0, 0)
        if any(size != int(size) or not 0 <= size <= MAX_GROUP for size in block) or (any(block) and not all(block)):
            raise section.invalid_error("weight_block_size", f"two whole numbers from 1 to {MAX_GROUP}")
        return WeightFormat("fp8", FP8_BITS, int(block[0]), int(block[1]), FP8_SCALE_BITS)
    if method == "compressed-tensors":
        return _read_compressed_format(section)
    raise UnsupportedModel(
        f"config.json: quantization_config has quant_method {method[:80]!r}, which is not supported",
        hint="known methods: compressed-tensors fp8 mxfp4",
    )


def _read_compressed_format(section: ConfigFields) -> WeightFormat:
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise UnsupportedModel(
            f"config.json: quantization_config has {len(groups.values)} config_groups; only one can be planned"
        )
    weights = groups.section(next(iter(groups.values))).section("weights")
    kind, bits = weights.text("type"), weights.size("num_bits", maximum=8)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise UnsupportedModel(f"config.json: quantization_config has {kind[:20]} weights of {bits} bits")
    scale_bits = INT_SCALE_BITS if kind == "int" else FP8_SCALE_BITS
    name = "fp8" if kind == "float" else f"int{bits}"
    match strategy := weights.text("strategy"):
        case "group":
            group = weights.size("group_size", maximum=MAX_GROUP)
            return WeightFormat(name, bits, 1, group, scale_bits)
        case "channel":
            return WeightFormat(name, bits, 1, 0, scale_bits)
        case "tensor":
            return WeightFormat(name, bits, 0, 0, scale_bits)
        case "block":
            rows, columns = (int(n) for n in weights.number_list("block_structure", 2))
            return WeightFormat(name, bits, rows, columns, scale_bits)
    raise UnsupportedModel(f"config.json: quantization_config has strategy {strategy[:80]!r}, which cannot be planned")


def _is_kept(kind: WeightKind, patterns: tuple[str, ...], outline: ModelOutline) -> bool:
    """Return whether the patterns except all matrices of this kind from quantisation."""
    matchers = [_make_matcher(pattern) for pattern in patterns]
    results = {any(matches(name) for matches in matchers) for name in _module_names(kind, outline)}
    if len(results) > 1:
        raise UnsupportedModel(
            f"config.json: quantization_config excepts some matrices of the kind {kind!r} and not others,"
            " which cannot be planned"
        )
    return True in results


def _module_names(kind: WeightKind, outline: ModelOutline) -> Iterator[str]:
    if kind == "head":
        yield "lm_head"
        return
    has_latents = outline.latent is not None
    for index, layer in enumerate(outline.layers):
        is_there = {
            "attention": layer.attention != "state",
            "dense ffn": not layer.has_experts,
            "routed experts": layer.has_experts,
            "shared experts": layer.has_experts and outline.experts is not None and outline.experts.shared_ffn > 0,
        }[kind]
        if kind == "attention" and not is_there:
            yield f"model.layers.{index}.linear_attn.out_proj"
        for module in MODULES[kind] if is_there else ():
            if has_latents or not module.endswith("_b_proj"):
                yield f"model.layers.{index}.{module}"


def _make_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a module's name matches a pattern of the config.

    Regular expressions are compiled by RE2, because a pattern that backtracks could take years."""
    if not pattern.startswith("re:"):
        return lambda name: (
            name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern) or f".{pattern}." in name
        )
    try:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(f"it has {len(pattern)} characters, more than {MAX_PATTERN_CHARS}")
        compiled = compile_linear_regex(pattern[3:])
    except ValueError as e:
        raise ModelFileError(
            f"config.json: quantization_config.ignore has an unsupported pattern, {pattern[:80]!r}: {e}"
        ) from e
    return lambda name: compiled.match(name) is not None
