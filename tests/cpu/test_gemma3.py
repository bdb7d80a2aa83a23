"""Gemma 3 270M, from its GGUF file, compared with transformers: 200 greedy tokens behind a prompt beyond its window.

What transformers computes is recorded in a file: it takes 14 s. To renew it, delete it and run this test twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gemma_file
import torch

from emberline import LLM, SamplingParams
from emberline.hub.source import resolve_model

PROMPT = "Squares: " + " ".join(f"{n} times {n} is {n * n}." for n in range(10, 49))
STEPS, WINDOW = 200, 512
RECORD = Path(__file__).with_name("gemma3_by_transformers.json")


def test_200_greedy_tokens_equal_those_of_transformers() -> None:
    directory = resolve_model(str(gemma_file.find_or_skip()), show_progress=False, as_safetensors=True)
    llm = LLM(str(directory), dtype="float32", kv_memory=1 << 28, max_context=2048)
    prompt = llm.tokenizer.encode(PROMPT)
    assert len(prompt) > WINDOW
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=0)
    ours = llm.generate([prompt], params, progress=False)[0]
    if not RECORD.exists():
        RECORD.write_text(json.dumps(compute_with_transformers(directory, prompt, ours.tokens)) + "\n")
        raise AssertionError(f"{RECORD} was missing and has been written: run again")
    theirs = json.loads(RECORD.read_text())
    assert theirs["file"] == gemma_file.SHA256
    assert prompt == theirs["prompt"] and ours.tokens == theirs["tokens"]
    logprobs = torch.tensor([p.logprob for p in ours.logprobs])
    assert torch.allclose(logprobs, torch.tensor(theirs["logprobs"]), atol=2e-3)


def compute_with_transformers(directory: Path, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    """Return the choice of transformers at every step, for the same preceding tokens, and its log-probabilities."""
    import transformers

    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + tokens]), logits_to_keep=STEPS + 1).logits[0, :-1]
    best = logits.log_softmax(-1).max(-1)
    return {
        "file": gemma_file.SHA256,
        "transformers": transformers.__version__,
        "prompt": prompt,
        "tokens": best.indices.tolist(),
        "logprobs": [round(value, 5) for value in best.values.tolist()],
    }
