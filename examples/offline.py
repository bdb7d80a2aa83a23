"""Continue several prompts in one batch, in this process."""

from emberline import LLM, SamplingParams

params = SamplingParams(max_tokens=12, temperature=0)
with LLM("smollm2") as llm:
    for completion in llm.generate(["The capital of France is", "Water boils at"], params):
        print(repr(completion.text), completion.finish_reason)
