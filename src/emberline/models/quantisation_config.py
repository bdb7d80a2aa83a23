"""read_quantisation: what the quantization_config of a config.json says, for all publishers' methods.

A scheme is a format and the modules that have it. Activations are not quantised by what a config says: kernels
quantise them dynamically or not at all, so that static scales of activations have no effect.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from emberline.core.errors import ModelFileError, UnsupportedModel
from emberline.core.linear_regex import MAX_PATTERN_CHARS, compile_linear_regex
from emberline.hub.checkpoint import MODELOPT_FILE
from emberline.kernels.four_bit_size import can_pack, count_packed_bytes
from emberline.models.fields import ConfigFields

MAX_GROUP = 1 << 16  # of weights with one scale; larger sizes are rejected as damaged or malicious
INT_SCALE_BITS, FP8_SCALE_BITS, FLOAT4_SCALE_BITS = 16, 32, 8  # scales of integers are bf16 or float16
ROW_SCALE_BITS = 32  # nvfp4 has one more scale for each row, in float32
ZERO_BITS = 8  # zero points of int4 are kept in a byte
MXFP4_GROUP, NVFP4_GROUP = 32, 16
CODES_PER_WORD = 8  # codes of four bits in an int32
CLASS_TARGETS = ("Linear", "FusedMoE")  # targets that name classes of modules and stand for all matrices
COMPRESSED_FORMATS = (
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
ACT_ORDERS = ("group", "static", "weight", "dynamic")
METHODS_HINT = (
    "supported: compressed-tensors, fp8, fbgemm_fp8, awq, gptq, mxfp4 and modelopt, with int4, fp8 (e4m3), MXFP4 or"
    " NVFP4 weights"
)
KV_HINT = "use --kv-dtype bfloat16, which needs no scales"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantised matrices: a number of bits for each weight, and a scale for each group of weights."""

    name: str
    bits: int
    group_rows: int  # rows and columns of weights that share a scale; 0: all rows or columns
    group_columns: int
    scale_bits: int
    zero_bits: int = 0  # of the zero point of each group
    row_bits: int = 0  # of other data that each row has

    @property
    def row_unit(self) -> int:
        """Number of rows that share scales or words of zero points: a matrix can be divided only at multiples of it."""
        return CODES_PER_WORD if self.name == "int4" else max(1, self.group_rows)

    def kept_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix and its scales on an H100 or H200. Other GPUs need at most as many."""
        if can_pack(self.name, rows, columns, self.group_columns):
            return count_packed_bytes(self.name, rows, columns, self.group_columns, has_zeros=self.zero_bits > 0)
        groups = -(-rows // (self.group_rows or rows)) * -(-columns // (self.group_columns or columns))
        bits = groups * (self.scale_bits + self.zero_bits) + rows * self.row_bits
        return -(-rows * columns * self.bits // 8) + -(-bits // 8)


MXFP4 = WeightFormat("mxfp4", 4, 1, MXFP4_GROUP, FLOAT4_SCALE_BITS)
NVFP4 = WeightFormat("nvfp4", 4, 1, NVFP4_GROUP, FLOAT4_SCALE_BITS, row_bits=ROW_SCALE_BITS)
FP8_TENSOR = WeightFormat("fp8", 8, 0, 0, FP8_SCALE_BITS)
FP8_ROWS = WeightFormat("fp8", 8, 1, 0, FP8_SCALE_BITS)


def make_int4_format(group: int, *, has_zeros: bool = False) -> WeightFormat:
    """Return a format of four-bit integers. `group`: columns that share a scale; 0: the whole row."""
    return WeightFormat("int4", 4, 1, group, INT_SCALE_BITS, ZERO_BITS if has_zeros else 0)


@dataclass(frozen=True, slots=True)
class QuantisationScheme:
    format: WeightFormat
    targets: tuple[str, ...] = ()  # modules that have this format; none: all
    has_column_order: bool = False  # whether tensors say to which group each column belongs


@dataclass(frozen=True, slots=True)
class QuantisationConfig:
    method: str
    schemes: tuple[QuantisationScheme, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantised
    zero_offset: int = 0  # added to stored zero points, as the first format of GPTQ requires

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the formats, sorted."""
        return tuple(sorted({scheme.format.name for scheme in self.schemes}))

    def find_format(self, module: str) -> WeightFormat | None:
        """Return the format of a module's matrix; None: it is not quantised."""
        if _matches_any(self.ignored, module):
            return None
        named = (scheme for scheme in self.schemes if _matches_any(scheme.targets, module))
        of_all = (scheme for scheme in self.schemes if not scheme.targets)  # after those that name modules
        return next((scheme.format for scheme in (*named, *of_all)), None)


def read_quantisation(config: Mapping[str, object]) -> QuantisationConfig | None:
    """Return what the quantization_config of a language model's config says; None: there is none.

    Raises UnsupportedModel, naming the field, for what cannot be loaded."""
    section = _find_section(config)
    if section is None:
        return None
    method = section.text("quant_method", "modelopt" if section.where.startswith(MODELOPT_FILE) else None)
    if method not in METHODS:
        raise UnsupportedModel(
            f"config.json: quantization_config has quant_method {method[:80]!r}, which is not supported",
            hint=METHODS_HINT,
        )
    return METHODS[method](section)


def check_kv_scheme(config: Mapping[str, object]) -> None:
    """Raise UnsupportedModel if a config quantises keys and values to anything but float8 with a scale per tensor.

    Only an engine with a float8 KV cache uses such scales."""
    section = _find_section(config)
    if section is None:
        return
    kv = section.text("kv_cache_quant_algo", "none").upper()
    require_support(section, "kv_cache_quant_algo", kv in ("NONE", "FP8"), KV_HINT)
    if section.has_field("kv_cache_scheme"):
        scheme = section.section("kv_cache_scheme")
        require_support(scheme, "num_bits", scheme.size("num_bits", maximum=64) == 8, KV_HINT)
        require_support(scheme, "type", scheme.text("type", "float") == "float", KV_HINT)
        require_support(scheme, "strategy", scheme.text("strategy", "tensor") == "tensor", KV_HINT)


def _find_section(config: Mapping[str, object]) -> ConfigFields | None:
    """Return quantization_config, or what a ModelOpt file has instead (see hub/checkpoint.py); None: neither is set."""
    fields = ConfigFields(config, "config.json")
    if not fields.has_field("quantization_config"):
        return None
    section = fields.section("quantization_config")
    if not section.has_field(MODELOPT_FILE):
        return section
    section = ConfigFields(section.section(MODELOPT_FILE).values, MODELOPT_FILE)
    if not section.has_field("quantization"):
        raise section.invalid_error("quantization", "an object")
    section = section.section("quantization")
    return section if section.text("quant_algo", "") else None


def require_support(section: ConfigFields, name: str, is_supported: bool, hint: str = METHODS_HINT) -> None:
    """Raise UnsupportedModel, naming the field and its value, unless `is_supported`."""
    if not is_supported:
        raise UnsupportedModel(
            f"{section.where}: {name} is {str(section.values.get(name))[:80]!r}, which is not supported", hint=hint
        )


def _read_mxfp4(section: ConfigFields) -> QuantisationConfig:
    scheme = QuantisationScheme(MXFP4, ("re:.*experts.*",))
    return QuantisationConfig("mxfp4", (scheme,), section.text_list("modules_to_not_convert"))


def _read_fp8(section: ConfigFields) -> QuantisationConfig:
    require_support(section, "activation_scheme", section.text("activation_scheme", "dynamic") in ("dynamic", "static"))
    require_support(section, "fmt", section.text("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"))
    found = FP8_TENSOR
    if section.has_field("weight_block_size"):
        found = _read_block(section, "weight_block_size")
    ignored = section.text_list("modules_to_not_convert") + section.text_list("ignored_layers")
    return QuantisationConfig("fp8", (QuantisationScheme(found),), ("lm_head", *ignored))


def _read_block(section: ConfigFields, name: str) -> WeightFormat:
    rows, columns = section.number_list(name, 2)
    if any(size != int(size) or not 1 <= size <= MAX_GROUP for size in (rows, columns)):
        raise section.invalid_error(name, f"two whole numbers from 1 to {MAX_GROUP}")
    return WeightFormat("fp8", 8, int(rows), int(columns), FP8_SCALE_BITS)


def _read_fbgemm(section: ConfigFields) -> QuantisationConfig:
    ignored = section.text_list("modules_to_not_convert")
    return QuantisationConfig("fbgemm_fp8", (QuantisationScheme(FP8_ROWS),), ("lm_head", *ignored))


def _read_awq(section: ConfigFields) -> QuantisationConfig:
    bits, group = ("w_bit", "q_group_size") if section.has_field("w_bit") else ("bits", "group_size")
    require_support(section, bits, section.size(bits, maximum=64) == 4)
    require_support(section, "version", section.text("version", "gemm").lower() == "gemm")
    found = make_int4_format(_read_group(section, group), has_zeros=section.flag("zero_point", True))
    ignored = section.text_list("modules_to_not_convert")
    return QuantisationConfig("awq", (QuantisationScheme(found),), ("lm_head", *ignored))


def _read_gptq(section: ConfigFields) -> QuantisationConfig:
    require_support(section, "bits", section.size("bits", maximum=64) == 4)
    layout = section.text("checkpoint_format", "gptq")
    require_support(section, "checkpoint_format", layout in ("gptq", "gptq_v2"))
    require_support(section, "dynamic", not section.values.get("dynamic"))
    require_support(section, "pack_dtype", section.text("pack_dtype", "int32") == "int32")
    found = make_int4_format(_read_group(section, "group_size"), has_zeros=not section.flag("sym", True))
    scheme = QuantisationScheme(found, has_column_order=section.flag("desc_act", False))
    ignored = () if section.flag("lm_head", False) else ("lm_head",)
    return QuantisationConfig("gptq", (scheme,), ignored, zero_offset=1 if layout == "gptq" else 0)


def _read_group(section: ConfigFields, name: str) -> int:
    """Return a group size, for which -1 stands for whole rows."""
    group = section.size(name, minimum=-1, maximum=MAX_GROUP)
    if not group:
        raise section.invalid_error(name, f"-1, or a whole number from 1 to {MAX_GROUP}")
    return max(0, group)


def _read_modelopt(section: ConfigFields) -> QuantisationConfig:
    algorithm = section.text("quant_algo").upper()
    formats = {"FP8": FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": FP8_ROWS, "NVFP4": NVFP4}
    formats["FP8_PB_WO"] = WeightFormat("fp8", 8, 128, 128, FP8_SCALE_BITS)
    require_support(section, "quant_algo", algorithm in formats)
    if algorithm == "NVFP4":
        require_support(
            section, "group_size", section.size("group_size", NVFP4_GROUP, maximum=MAX_GROUP) == NVFP4_GROUP
        )
    ignored = section.text_list("ignore") + section.text_list("exclude_modules")
    scheme = QuantisationScheme(formats[algorithm])
    return QuantisationConfig("modelopt", (scheme,), ("lm_head", *ignored))


def _read_compressed(section: ConfigFields) -> QuantisationConfig:
    require_support(section, "format", section.text("format", "") in COMPRESSED_FORMATS)
    require_support(section, "transform_config", not section.values.get("transform_config"))
    if section.values.get("sparsity_config"):
        sparsity = section.section("sparsity_config")
        require_support(sparsity, "format", sparsity.text("format", "dense") == "dense")  # weights without gaps
    groups = section.section("config_groups")
    named = (groups.section(name) for name in groups.values)
    schemes = tuple(_read_scheme(group) for group in named if group.has_field("weights"))
    if not schemes:
        raise section.invalid_error("config_groups", "an object with a scheme for weights")
    return QuantisationConfig("compressed-tensors", schemes, section.text_list("ignore"))


def _read_scheme(group: ConfigFields) -> QuantisationScheme:
    if group.has_field("format"):
        require_support(group, "format", group.text("format") in COMPRESSED_FORMATS)
    weights = group.section("weights")
    kind, bits = weights.text("type"), weights.size("num_bits", maximum=64)
    if (kind, bits) not in (("int", 4), ("float", 8), ("float", 4)):
        raise UnsupportedModel(
            f"{weights.where}: num_bits is {bits} and type {kind[:20]!r}, which is not supported", hint=METHODS_HINT
        )
    symmetric, order = weights.flag("symmetric", True), weights.text("actorder", "")
    require_support(weights, "symmetric", symmetric or kind == "int")
    require_support(weights, "actorder", not order or (kind == "int" and order in ACT_ORDERS))
    found = _read_compressed_format(weights, kind, bits, symmetric)
    targets = group.text_list("targets")
    return QuantisationScheme(
        found, () if set(targets) & set(CLASS_TARGETS) else targets, has_column_order=order in ("group", "dynamic")
    )


def _read_compressed_format(weights: ConfigFields, kind: str, bits: int, symmetric: bool) -> WeightFormat:
    strategy = weights.text("strategy")
    match kind, bits, strategy:
        case ("int", 4, "group"):
            return make_int4_format(weights.size("group_size", maximum=MAX_GROUP), has_zeros=not symmetric)
        case ("int", 4, "channel"):
            return make_int4_format(0, has_zeros=not symmetric)
        case ("float", 8, "tensor"):
            return FP8_TENSOR
        case ("float", 8, "channel"):
            return FP8_ROWS
        case ("float", 8, "block"):
            return _read_block(weights, "block_structure")
        case ("float", 4, "tensor_group" | "group"):
            size = weights.size("group_size", maximum=MAX_GROUP)
            wanted = NVFP4 if strategy == "tensor_group" else MXFP4
            require_support(weights, "group_size", size == wanted.group_columns)
            return wanted
    raise UnsupportedModel(
        f"{weights.where}: strategy is {strategy[:80]!r}, which is not supported for {kind} weights of {bits} bits",
        hint=METHODS_HINT,
    )


METHODS: Mapping[str, Callable[[ConfigFields], QuantisationConfig]] = {
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
}


def _matches_any(patterns: tuple[str, ...], module: str) -> bool:
    """Return whether a pattern matches the module, also under the names that it has in a multimodal model."""
    names = (module, f"language_model.{module}", module.replace("model.", "model.language_model.", 1))
    return any(match(name) for match in (_make_matcher(p) for p in patterns) for name in names)


@lru_cache(maxsize=1024)
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
            f"config.json: quantization_config has an unsupported pattern, {pattern[:80]!r}: {e}"
        ) from e
    return lambda name: compiled.match(name) is not None
