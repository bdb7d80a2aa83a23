"""Get JSON that matches a schema, whatever the model's size.

Needs `.venv/bin/pip install -e '.[examples]'`, and runs with `.venv/bin/python examples/structured.py`.
"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
reply = client.chat.completions.create(
    model="smollm2",
    messages=[{"role": "user", "content": "Name a large city and how many people live there."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
)
print(json.loads(reply.choices[0].message.content or ""))
