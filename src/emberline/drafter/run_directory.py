"""RunDirectory: the directory of a training run, with the settings, the data and the state that a restart continues.

training.json         settings and the model's fingerprint, written first
data/                 generated answers, one file for each round
state.pt              weights, optimizer and number of the step, while training is not complete
config.json, model.safetensors, report.json       the result
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from emberline.core.errors import InvalidRequest, ModelFileError
from emberline.core.jsonfile import read_object, read_object_if_exists
from emberline.drafter.checkpoint import write_json

FORMAT_VERSION = 1


class RunDirectory:
    def __init__(self, path: Path) -> None:
        """Open a new or an earlier run. Raise InvalidRequest if the directory contains other files.

        A new run may find `data` of another run, copied there to train again with other settings."""
        self.path = path
        self._settings_file, self._state_file = path / "training.json", path / "state.pt"
        if path.exists() and not path.is_dir():
            raise InvalidRequest(f"{path} is not a directory", param="out", hint="choose another --out")
        has_run = self._settings_file.exists()
        if path.is_dir() and not has_run and any(each != self.data for each in path.iterdir()):
            message = f"{path} has files, but no training.json of an earlier training"
            raise InvalidRequest(message, param="out", hint="choose an empty or a new directory as --out")
        self.stored = read_object_if_exists(self._settings_file) or None
        if self.stored is not None and self.stored.get("version") != FORMAT_VERSION:
            message = f"{self._settings_file} has version {self.stored.get('version')!r}, not {FORMAT_VERSION}"
            raise InvalidRequest(message, param="out", hint="choose another --out")

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def stored_settings(self) -> dict[str, Any] | None:
        return None if self.stored is None else dict(self.stored["settings"])

    def begin(self, model_name: str, fingerprint: str, settings: dict[str, Any]) -> None:
        """Store the model and the settings of a new run, or check that an earlier run had the same model."""
        if self.stored is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self.stored = {
                "version": FORMAT_VERSION,
                "model": model_name,
                "fingerprint": fingerprint,
                "settings": settings,
            }
            write_json(self._settings_file, self.stored)
        elif self.stored["fingerprint"] != fingerprint:
            raise InvalidRequest(
                f"the model is {model_name}, but the training in {self.path} was started with {self.stored['model']}, "
                "whose weights differ",
                param="model",
                hint="give that model to continue, or choose another --out",
            )

    def save_state(self, state: dict[str, Any]) -> None:
        part = self._state_file.with_suffix(".part")
        with part.open("wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        part.replace(self._state_file)

    def load_state(self, device: torch.device) -> dict[str, Any] | None:
        """Return the state of an interrupted training; None if there is none."""
        if not self._state_file.exists():
            return None
        try:
            state = torch.load(self._state_file, map_location=device, weights_only=True)
        except Exception as e:  # pickle, zip and torch each raise their own errors
            hint = "delete this file; training then starts again with the same data"
            raise ModelFileError(f"{self._state_file} is damaged: {e}", hint=hint) from e
        return dict(state)

    def finish(self, report: dict[str, Any]) -> None:
        """Store the report, which marks the run as complete, and delete the state."""
        write_json(self.path / "report.json", report)
        self._state_file.unlink(missing_ok=True)

    def load_report(self) -> dict[str, Any] | None:
        """Return the report of a complete run; None if the run is not complete."""
        file = self.path / "report.json"
        return read_object(file) if file.exists() else None
