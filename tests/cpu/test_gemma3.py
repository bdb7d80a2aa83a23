"""Gemma 3 270M, from its GGUF file, compared with transformers: 200 greedy tokens behind a prompt beyond its window."""

from __future__ import annotations

import gemma_file
import torch

from emberline import LLM, SamplingParams
from emberline.hub.source import resolve_model

PROMPT = "Squares: " + " ".join(f"{n} times {n} is {n * n}." for n in range(10, 49))
STEPS, WINDOW = 200, 512


def test_200_greedy_tokens_equal_those_of_transformers() -> None:
    directory = resolve_model(str(gemma_file.find_or_skip()), show_progress=False, as_safetensors=True)
    from transformers import AutoModelForCausalLM

    llm = LLM(str(directory), dtype="float32", kv_memory=1 << 28, max_context=2048)
    prompt = llm.tokenizer.encode(PROMPT)
    assert len(prompt) > WINDOW
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=0)
    ours = llm.generate([prompt], params, progress=False)[0]
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    # One pass over our tokens gives the choice of transformers at every step, for the same preceding tokens.
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + ours.tokens]), logits_to_keep=STEPS + 1).logits[0, :-1]
    assert ours.tokens == logits.argmax(-1).tolist()
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ours.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor([p.logprob for p in ours.logprobs]), theirs, atol=2e-3)
