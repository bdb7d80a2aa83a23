"""Writes the logits of every token of some sequences, computed by llama.cpp, to a file.

python llamacpp_logits.py '{"model": .., "threads": .., "sequences": [[..], ..], "out": "logits.npz"}'
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def compute_logits(settings: dict[str, Any]) -> list[Any]:
    """Return an array [tokens, vocabulary] for each sequence."""
    numpy: Any = import_module("numpy")
    library: Any = import_module("llama_cpp")
    library.llama_backend_init()
    model = library.llama_model_load_from_file(settings["model"].encode(), library.llama_model_default_params())
    vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    found = []
    for tokens in settings["sequences"]:
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = max(512, len(tokens))
        params.n_threads = params.n_threads_batch = settings["threads"]
        context, batch = library.llama_init_from_model(model, params), library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.logits[row] = token, row, True
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        if status := library.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        rows = [library.llama_get_logits_ith(context, row) for row in range(len(tokens))]
        found.append(numpy.stack([numpy.ctypeslib.as_array(row, (vocab,)).copy() for row in rows]))
        library.llama_batch_free(batch)
        library.llama_free(context)
    return found


if __name__ == "__main__":
    request = json.loads(sys.argv[-1])
    import_module("numpy").savez(request["out"], *compute_logits(request))
