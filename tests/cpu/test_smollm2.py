"""SmolLM2 compared with transformers: 200 greedy tokens and their logits."""

from __future__ import annotations

import pytest
import torch

from emberline import LLM, SamplingParams
from emberline.hub.source import resolve_model

PROMPT = "The history of the city begins"
STEPS = 200


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(resolve_model("smollm2", as_safetensors=True), dtype="float32", kv_memory=1 << 28)


def test_200_greedy_tokens_equal_those_of_transformers(llm: LLM) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2", as_safetensors=True), dtype=torch.float32)
    prompt = llm.tokenizer.encode(PROMPT)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=0)
    ours = llm.generate([prompt], params, progress=False)[0]
    # One pass over our tokens gives the choice of transformers at every step, for the same preceding tokens.
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + ours.tokens])).logits[0, len(prompt) - 1 : -1]
    assert ours.tokens == logits.argmax(-1).tolist()
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ours.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor([p.logprob for p in ours.logprobs]), theirs, atol=2e-3)


def test_answers_capital_of_france_with_the_weights_of_its_file() -> None:
    llm = LLM("smollm2", kv_memory=1 << 28)
    question = [{"role": "user", "content": "Name the capital of France."}]
    answer = llm.chat(question, SamplingParams(max_tokens=20, temperature=0.0))
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_stop_strings_across_tokens_and_echo_free_text(llm: LLM) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0.0), progress=False)[0]
    cut = whole.text[10:14]  # almost surely spans two tokens
    stopped = llm.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0.0, stop=(cut,)), progress=False)[0]
    assert stopped.finish_reason == "stop" and stopped.text == whole.text[: whole.text.index(cut)]
