"""Continue several prompts in one batch, in this process."""

from emberline import LLM, SamplingParams

llm = LLM("smollm2")
params = SamplingParams(max_tokens=12, temperature=0)
for completion in llm.generate(["The capital of France is", "Water boils at"], params):
    print(repr(completion.text), completion.finish_reason)
