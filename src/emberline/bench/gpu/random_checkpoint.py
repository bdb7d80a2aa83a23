"""`python -m emberline.bench.gpu.random_checkpoint DIR`: writes a model of Llama 3.1 8B's shape that can be served.

Weights are random. The tokenizer has a token for each byte, so a letter of English text is a token, and a made-up word
for every other id of the vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from emberline.bench.gpu.model import LLAMA_8B, write_checkpoint


def write_random_model(directory: Path, hf_config: Mapping[str, Any] = LLAMA_8B, *, device: str = "cuda") -> None:
    write_checkpoint(directory, hf_config, device=device)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{number}" for number in range(len(letters), hf_config["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*letters, *words])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m emberline.bench.gpu.random_checkpoint", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="takes 16 GB")
    parser.add_argument("--device", default="cuda", help="on which weights are drawn (default: %(default)s)")
    args = parser.parse_args()
    write_random_model(args.directory, device=args.device)


if __name__ == "__main__":
    main()
