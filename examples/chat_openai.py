"""Talk to a running server (`scripts/serve`) with the OpenAI client.

Needs `.venv/bin/pip install -e '.[examples]'`, and runs with `.venv/bin/python examples/chat_openai.py`.
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Explain in one sentence what the internet is."}],
    stream=True,
    temperature=0,
    max_tokens=100,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
