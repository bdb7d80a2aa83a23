"""Reads and writes the checkpoint of an EAGLE-3 head, in the format that other engines read too.

The files are config.json and model.safetensors. Weights are bfloat16. `d2t` (int64) maps draft ids to target ids:
target id = draft id + d2t[draft id]. `t2d` (bool) says which tokens of the target can be drafted. The embedding is the
target's own and is not stored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from emberline.core.errors import ModelFileError
from emberline.core.jsonfile import read_object
from emberline.drafter.head import TrainableHead
from emberline.drafter.head_config import HeadConfig
from emberline.drafter.vocabulary import DraftVocabulary

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def write_head(directory: Path, head: TrainableHead, vocabulary: DraftVocabulary) -> None:
    """Write the checkpoint. Each file appears complete or not at all."""
    weights = {name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    weights |= {"d2t": torch.from_numpy(vocabulary.d2t), "t2d": torch.from_numpy(vocabulary.t2d)}
    part = directory / f"{WEIGHTS_FILE}.part"
    save_file(weights, part, metadata={"format": "pt"})
    part.replace(directory / WEIGHTS_FILE)
    write_json(directory / CONFIG_FILE, head.config.to_json())


def read_head(directory: Path) -> tuple[TrainableHead, DraftVocabulary]:
    """Return the head of a checkpoint with float32 weights on the CPU. Raise ModelFileError if it is damaged."""
    config = HeadConfig.from_json(read_object(directory / CONFIG_FILE), str(directory / CONFIG_FILE))
    file = directory / WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as e:
        raise ModelFileError(f"cannot read {file}: {e}") from e
    shapes = config.tensor_shapes() | {"d2t": (config.draft_vocab,), "t2d": (config.vocab,)}
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise ModelFileError(f"{file} must have a tensor {name} of shape {list(shape)}")
    ids = tensors.pop("d2t").numpy() + np.arange(config.draft_vocab)
    tensors.pop("t2d")
    head = TrainableHead(config)
    head.load_state_dict({name: tensors[name].float() for name in config.tensor_shapes()})
    return head, DraftVocabulary(ids, config.vocab)


def write_json(file: Path, values: object) -> None:
    """Write a JSON file that appears complete or not at all."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w", encoding="utf-8") as handle:
        handle.write(json.dumps(values, indent=1) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    part.replace(file)
