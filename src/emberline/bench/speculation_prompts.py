"""Prompts for measuring speculative decoding: edits of this repository's own code, and chat questions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import emberline
from emberline.core.errors import InvalidRequest

MIN_LINES, MAX_LINES = 15, 45  # of a piece of code that is edited
QUESTIONS = (
    "Tell me about the history of tea in three short paragraphs.",
    "Explain to a child how a heat pump works.",
    "Write a short story about a lighthouse keeper and a letter in a bottle.",
    "What are the main differences between TCP and UDP?",
    "Give me five ideas for a dinner without meat.",
    "How do I ask my neighbour politely to turn the music down?",
    "Summarize the causes of the First World War.",
    "Which exercises help against back pain from sitting?",
    "Write a poem about the first snow of the year.",
    "What should I look for when I buy a used bicycle?",
    "Explain compound interest with an example.",
    "How does a vaccine teach the immune system?",
    "Plan a weekend in Lisbon for two people.",
    "Why is the sky blue and the sunset red?",
    "What is the difference between a virus and a bacterium?",
    "Write a letter of thanks to a teacher.",
    "Describe the rules of chess to a beginner.",
    "How can I learn to sleep earlier?",
    "What happened at the Battle of Hastings?",
    "Explain what a black hole is, in simple words.",
    "How is glass made from sand?",
    "Write a short speech for the opening of a village library.",
    "What do I need to know before I adopt an old dog?",
    "Explain the difference between weather and climate.",
    "How do airplanes stay in the air?",
    "Tell me a joke about a programmer and explain it.",
    "Which plants grow well on a shady balcony?",
    "Describe a day in the life of a medieval baker.",
    "What are the pros and cons of working from home?",
    "How does a refrigerator keep food cold?",
    "Write an invitation to a garden party in June.",
    "Why do cats purr?",
    "Explain the idea of supply and demand with apples.",
    "How do I repair a flat bicycle tyre?",
    "What is the plot of Romeo and Juliet?",
    "Give me a packing list for a week of hiking.",
    "How did the Roman Empire come to an end?",
    "What makes bread rise?",
    "Write a short review of an imaginary film about the sea.",
    "How do I prepare for a job interview?",
    "Explain photosynthesis in five sentences.",
    "Which novels are set on an island?",
    "What is the difference between an acid and a base?",
    "How does a lock on a canal work?",
    "Write a dialogue between the sun and the moon.",
    "What should be in a first aid kit?",
    "How are diamonds formed?",
    "Explain how a bill becomes a law in a parliament.",
    "What can I cook with rice, eggs and spinach?",
    "Why do we have leap years?",
    "Describe the sound of a forest at night.",
    "How can a town reduce its traffic?",
    "What did Marie Curie discover?",
    "Explain the offside rule in football.",
    "How do bees find their way home?",
    "Write a short fairy tale about a clock that runs backwards.",
    "What is inflation, and what does it do to savings?",
    "How do I remove a coffee stain from a shirt?",
    "Which languages are spoken in Switzerland, and where?",
    "Explain how a camera makes a picture.",
)


def make_edits(count: int) -> list[str]:
    """Return prompts that each ask for a small change of a function or class of this package.

    Functions and classes of suitable length are picked at even intervals, so the prompts depend only on the version of
    this package.
    """
    pieces = list(_iter_pieces())
    step = max(1, len(pieces) // count)
    return [_EDITS[i % len(_EDITS)](*piece) for i, piece in enumerate(pieces[::step][:count])]


def make_questions(count: int) -> list[str]:
    """Return questions that all differ, since the answer to a repeated question could be drafted from the first."""
    if count > len(QUESTIONS):
        raise InvalidRequest(
            f"{count} different questions are needed; there are {len(QUESTIONS)}",
            param="prompts",
            hint="lower --prompts",
        )
    return list(QUESTIONS[:count])


def _iter_pieces() -> Iterator[tuple[str, str]]:
    """Yield the name and the code of each function and class of the package that has a suitable length."""
    for path in sorted(Path(emberline.__file__).parent.rglob("*.py")):
        text = path.read_text("utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno is not None:
                code = lines[node.lineno - 1 : node.end_lineno]
                if MIN_LINES <= len(code) <= MAX_LINES:
                    yield node.name, "\n".join(code)


def _ask(instruction: str, code: str) -> str:
    return f"{instruction} Reply with the complete new code and nothing else.\n```python\n{code}\n```"


def _ask_to_rename(name: str, code: str) -> str:
    return _ask(f"Rename `{name}` to `{name}_v2` everywhere.", code)


def _ask_for_a_comment(name: str, code: str) -> str:
    return _ask(f"Add the comment `# reviewed` above the definition of `{name}`.", code)


def _ask_for_a_parameter(name: str, code: str) -> str:
    return _ask("Add the parameter `verbose: bool = False` to the first function.", code)


_EDITS: tuple[Callable[[str, str], str], ...] = (_ask_to_rename, _ask_for_a_comment, _ask_for_a_parameter)


CITIES = ("Lisbon", "Osaka", "Nairobi", "Quito", "Oslo", "Perth", "Riga", "Lima", "Hanoi", "Cork")
NAME_SCHEMA = {"type": "string", "maxLength": 40}
TOOL_CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather_forecast"},
        "arguments": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "maxLength": 40},
                        "country": {"type": "string", "maxLength": 40},
                    },
                    "required": ["city", "country"],
                    "additionalProperties": False,
                },
                "number_of_days": {"type": "integer", "minimum": 1, "maximum": 14},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                "include_hourly_forecast": {"type": "boolean"},
            },
            "required": ["location", "number_of_days", "temperature_unit", "include_hourly_forecast"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def make_tool_requests(count: int) -> list[str]:
    """Return requests that a model answers by a tool call of TOOL_CALL_SCHEMA."""
    return [
        f"What will the weather be in {CITIES[i % len(CITIES)]} over the next {2 + i % 6} days? Reply with a JSON call "
        "of the tool get_weather_forecast."
        for i in range(count)
    ]
