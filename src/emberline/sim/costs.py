"""find_cost_table: the measured step costs of a GPU, by the model's shape and the format of its weights."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from emberline.core.errors import InvalidRequest
from emberline.core.step_costs import StepCostData, StepCostTable

TABLES_FILE = "cost_tables.json"  # package data; bench/cost_tables.py makes it from result files


def find_cost_table(gpu: str, shape: str, weights: str = "plain") -> StepCostTable:
    """Return the measured table. Raises InvalidRequest if the GPU, the shape or the weights were not measured."""
    return StepCostTable.from_data(find_cost_data(gpu, shape, weights))


def find_cost_data(gpu: str, shape: str, weights: str = "plain") -> StepCostData:
    """Return the measured steps of which `find_cost_table` makes a table.

    Raises InvalidRequest if the GPU, the shape or the weights were not measured."""
    tables = list_cost_tables()
    for param, value, known in (
        ("gpu", gpu, [table.gpu for table in tables]),
        ("shape", shape, [table.shape for table in tables if table.gpu == gpu]),
        ("weights", weights, [table.weights for table in tables if (table.gpu, table.shape) == (gpu, shape)]),
    ):
        if value not in known:
            choices = ", ".join(dict.fromkeys(known))
            message = f"step costs were not measured for {param} {value!r}"
            raise InvalidRequest(message, param=param, hint=f"measured: {choices}")
    (data,) = (table for table in tables if (table.gpu, table.shape, table.weights) == (gpu, shape, weights))
    return data


@cache
def list_cost_tables() -> tuple[StepCostData, ...]:
    """Return the data of all measured tables, with their sources."""
    text = files("emberline.sim").joinpath(TABLES_FILE).read_bytes()
    return tuple(StepCostData.from_json(table) for table in json.loads(text))
