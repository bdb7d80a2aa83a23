"""StepCostTable: how long a step takes on one kind of hardware, interpolated from measured steps.

A step's time is that of its tokens (weights are read once and multiplied with every token), plus reading the keys and
values of each decoding request, plus the attention of prompt tokens, plus the sampling of each decoding request. The
first part is interpolated between measured steps; the other parts are proportional. The simulator uses tables in place
of GPUs. A worker on a CPU can delay its steps to the times in a table, to imitate the table's hardware."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.core.jsonfile import read_object
from emberline.core.plan import StepPlan, WorkItem

MEASURE_HINT = "write a table with: emberline bench step-costs MODEL --json FILE"
# Types of fields in JSON, by the annotation of the field. The items of `measured` are read one by one.
FIELD_TYPES: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured time of a step with `rows` decoding requests, or with one chunk of a prompt."""

    seconds: float
    rows: int = 0
    context: float = 0.0  # tokens of each row's context
    prompt: int = 0  # tokens of the prompt chunk
    start: int = 0  # tokens of the prompt before the chunk
    result: str = ""  # name of the result in the table's first source

    @property
    def tokens(self) -> int:
        return self.rows + self.prompt


@dataclass(frozen=True, slots=True)
class StepCostData:
    """A cost table as it is written in a JSON file."""

    gpu: str  # or the kind of CPU
    shape: str  # name of the model's shape
    weights: str  # format of the weights in memory
    sources: list[str]  # result files or commands with the measurements
    measured: list[MeasuredStep]
    context_seconds: float  # to read the keys and values of one token
    pair_seconds: float  # attention of one prompt token to one token
    row_seconds: float = 0.0  # extra time of a decoding request over a prompt token, since it samples
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0  # capacity of the KV cache with these weights; 0: not known
    plans_ahead: bool = False
    notes: str = ""

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> StepCostData:
        """Return the data of a JSON object. Raises InvalidRequest if a field is missing, unknown or of another type."""
        values = _read_fields(StepCostData, document)
        measured = document.get("measured")
        if not isinstance(measured, list) or not all(isinstance(each, dict) for each in measured):
            raise _field_error("measured", measured, "a list of objects")
        values["measured"] = [MeasuredStep(**_read_fields(MeasuredStep, each)) for each in measured]
        return StepCostData(**values)

    def scale(self, factor: float) -> StepCostData:
        """Return the data of hardware on which every step takes `factor` times as long."""
        if not 0 < factor < float("inf"):
            hint = "use a factor above 0"
            raise InvalidRequest(f"a cost table cannot be scaled by {factor}", param="factor", hint=hint)
        return replace(
            self,
            gpu=f"{self.gpu} x {factor:g}",
            measured=[replace(step, seconds=factor * step.seconds) for step in self.measured],
            context_seconds=factor * self.context_seconds,
            pair_seconds=factor * self.pair_seconds,
            row_seconds=factor * self.row_seconds,
        )


@dataclass(frozen=True, slots=True)
class StepCostTable:
    name: str
    source: str  # files with the measurements
    token_points: tuple[tuple[int, float], ...]  # (tokens of a step, seconds without attention), ascending
    context_seconds: float
    pair_seconds: float
    row_seconds: float = 0.0
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0
    plans_ahead: bool = False  # whether the engine plans a step while the one before runs, as it does on a GPU

    @staticmethod
    def from_data(data: StepCostData) -> StepCostTable:
        """Return the table of the measured steps. Raises InvalidRequest for invalid values or too few steps."""
        name = f"{data.gpu} {data.shape} {data.weights}"
        _check_not_negative(data, name)
        points: dict[int, float] = {}
        for step in data.measured:
            if step.tokens < 1 or not 0 < step.seconds < float("inf"):
                message = f"cost table {name!r} has a step of {step.tokens} tokens that takes {step.seconds} s"
                raise InvalidRequest(message, param="measured", hint=MEASURE_HINT)
            attention = data.context_seconds * step.rows * step.context
            attention += data.pair_seconds * count_prompt_pairs(step.start, step.prompt)
            seconds = step.seconds - attention - data.row_seconds * step.rows
            points[step.tokens] = min(seconds, points.get(step.tokens, seconds))  # noise only adds time
        if len(points) < 2:
            message = f"cost table {name!r} has {len(points)} sizes of steps; at least 2 are needed to interpolate"
            raise InvalidRequest(message, param="measured", hint=MEASURE_HINT)
        # A step with more tokens never takes less time. Measurements that say otherwise are noise.
        ascending: list[tuple[int, float]] = []
        for tokens, seconds in sorted(points.items()):
            ascending.append((tokens, max(seconds, ascending[-1][1] if ascending else 0.0)))
        return StepCostTable(
            name,
            ", ".join(data.sources),
            tuple(ascending),
            data.context_seconds,
            data.pair_seconds,
            data.row_seconds,
            data.kv_bytes_per_token,
            data.kv_tokens,
            data.plans_ahead,
        )

    @staticmethod
    def load(path: Path) -> StepCostTable:
        """Read a table that `emberline bench step-costs` wrote. Raises InvalidRequest if the file has no such table."""
        try:
            document = read_object(path)
        except ModelFileError as e:  # whose hint is about files of a model
            raise InvalidRequest(f"step_costs: {e.message}", param="step_costs", hint=MEASURE_HINT) from e
        config = document.get("config") if "bench" in document else {"table": document}
        table = config.get("table") if isinstance(config, dict) else None
        if not isinstance(table, dict):
            raise InvalidRequest(f"{path} has no cost table", param="step_costs", hint=MEASURE_HINT)
        return StepCostTable.from_data(StepCostData.from_json(table))

    def estimate_step_seconds(self, plan: StepPlan) -> float:
        return self.estimate_work_seconds(plan.work)

    def estimate_work_seconds(self, work: Iterable[WorkItem]) -> float:
        """Return the seconds of a step that computes these work items."""
        return self.step_seconds(*sum_work(work))

    def step_seconds(
        self, decode_rows: int, decode_context: float, prompt_tokens: int = 0, prompt_pairs: float = 0
    ) -> float:
        """Return the seconds of a step with decoding requests and chunks of prompts.

        `decode_rows`: the number of decoding requests. `decode_context`: the sum of their context lengths, in tokens.
        `prompt_tokens`: the number of tokens in the chunks. `prompt_pairs`: the sum of `count_prompt_pairs` over the
        chunks."""
        if not (tokens := decode_rows + prompt_tokens):
            return 0.0
        attention = self.context_seconds * decode_context + self.pair_seconds * prompt_pairs
        return _interpolate(self.token_points, tokens) + attention + self.row_seconds * decode_rows


def sum_work(work: Iterable[WorkItem]) -> tuple[int, int, int, int]:
    """Return the arguments of `step_seconds`: decode rows, decode context, prompt tokens, prompt pairs.

    A drafted token of a decoding request counts as a further decode row."""
    rows = context = prompt = pairs = 0
    for item in work:
        count = len(item.tokens)
        if count - item.num_draft > 1:
            prompt += count
            pairs += count_prompt_pairs(item.start, count)
        else:
            rows += count
            context += item.start + count
    return rows, context, prompt, pairs


def count_prompt_pairs(start: int, count: int) -> int:
    """Return the sum, over the tokens [start, start + count) of a prompt, of how many tokens each attends to."""
    return count * start + count * (count + 1) // 2


def _interpolate(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the seconds of a step with this many tokens, by linear interpolation between the measured points.

    Beyond the largest point, the line through the last two continues. A step smaller than the smallest point takes as
    long as that one, because it reads the same weights."""
    at = bisect_left(points, (tokens, 0.0))
    if at == 0:
        return points[0][1]
    (x0, y0), (x1, y1) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def _check_not_negative(data: StepCostData, name: str) -> None:
    for field in ("context_seconds", "pair_seconds", "row_seconds", "kv_bytes_per_token", "kv_tokens"):
        if not 0 <= (value := getattr(data, field)) < float("inf"):
            message = f"{field} of the cost table {name!r} is {value}; it must be 0 or more"
            raise InvalidRequest(message, param=field, hint=MEASURE_HINT)


def _read_fields(kind: type[Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object, with which the class `kind` can be built.

    Raises InvalidRequest if a field is missing, unknown or of another type."""
    known = {field.name: field for field in fields(kind)}
    if unknown := [name for name in document if name not in known]:
        message = f"a cost table has the unknown field {unknown[0]!r}"
        raise InvalidRequest(message, param=unknown[0], hint=f"known fields: {', '.join(known)}")
    for name, field in known.items():
        value, types = document.get(name, field.default), FIELD_TYPES.get(str(field.type), (list,))
        if value is MISSING or not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _field_error(name, document.get(name), str(field.type))
    return dict(document)


def _field_error(name: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name} of a cost table is {value!r}, not {expected}", param=name, hint=MEASURE_HINT)
