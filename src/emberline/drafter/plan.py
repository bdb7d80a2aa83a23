"""TrainingPlan: what a training run will compute and store, known before a model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.drafter.head_config import HeadConfig, default_draft_vocab
from emberline.drafter.run_directory import RunDirectory
from emberline.drafter.settings import TrainingSettings
from emberline.hub.checkpoint import Checkpoint
from emberline.models.config import ModelConfig

GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 8192, 1024
GPU_ROUND_PROMPTS, CPU_ROUND_PROMPTS = 4096, 64
GPU_RUNNING_REQUESTS, CPU_RUNNING_REQUESTS = 256, 64
ADAM_BYTES_PER_WEIGHT = 16  # float32 weight, gradient and two moments
PASS_BYTES_PER_LOGIT = 14  # logits in bfloat16 and float32, their log-softmax, and gradients


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    model: ModelConfig
    head: HeadConfig
    settings: TrainingSettings
    first_token: int  # token with which a base model starts to write
    on_gpu: bool

    @staticmethod
    def make(directory: Path, run: RunDirectory, explicit: dict[str, Any], *, on_gpu: bool) -> TrainingPlan:
        """Return the plan for the model in `directory`.

        `explicit`: settings of the command line. Raise InvalidRequest if they differ from those of an earlier run in
        the same output directory, or do not fit the model."""
        checkpoint = Checkpoint.open(directory)
        model = ModelConfig.from_checkpoint(checkpoint)
        defaults = {
            "batch_tokens": GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS,
            "round_prompts": GPU_ROUND_PROMPTS if on_gpu else CPU_ROUND_PROMPTS,
            "draft_vocab": default_draft_vocab(model.vocab),
        }
        settings = TrainingSettings.resolve(explicit, run.stored_settings, defaults, str(run.path))
        if settings.max_length > model.longest_context:
            message = (
                f"max_prompt and max_answer are {settings.max_length} tokens together; "
                f"they must be at most the model's context, {model.longest_context}"
            )
            raise InvalidRequest(message, param="max_answer")
        if settings.draft_vocab > model.vocab:
            message = f"draft_vocab is {settings.draft_vocab}; it must be at most the model's vocabulary, {model.vocab}"
            raise InvalidRequest(message, param="draft_vocab")
        head = HeadConfig.for_model(model, settings.draft_vocab)
        first = checkpoint.config.get("bos_token_id")
        first_token = first if isinstance(first, int) and 0 <= first < model.vocab else next(iter(model.eos), 0)
        return TrainingPlan(model, head, settings, first_token, on_gpu)

    @property
    def weights(self) -> int:
        """Number of the head's weights."""
        return sum(math.prod(shape) for shape in self.head.tensor_shapes().values())

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings of the engine that generates the answers. They limit the KV cache, to leave memory for training."""
        running = GPU_RUNNING_REQUESTS if self.on_gpu else CPU_RUNNING_REQUESTS
        # 64 more tokens for each request: the rest of its last block.
        tokens = running * (self.settings.max_length + 64)
        kv_bytes = (
            tokens * self.model.layers * self.model.kv_heads * self.model.head_dim * 2 * (2 if self.on_gpu else 4)
        )
        settings = {"max_context": self.settings.max_length, "max_running": running, "kv_memory": kv_bytes}
        return settings | ({"weights": "plain", "device": "cuda"} if self.on_gpu else {"device": "cpu"})

    def describe(self) -> str:
        settings, head = self.settings, self.head
        steps = settings.epochs * -(-settings.tokens // settings.batch_tokens)
        logits = settings.batch_tokens * head.draft_vocab * settings.passes * PASS_BYTES_PER_LOGIT
        memory = self.engine_settings["kv_memory"] + self.weights * ADAM_BYTES_PER_WEIGHT + logits
        source = settings.prompts or "user messages that the model makes up"
        return "\n".join(
            (
                f"head          {self.weights / 1e6:.1f} M weights, {2 * self.weights / 1e6:.1f} MB",
                f"target        {self.model.layers} layers; the head reads the inputs of layers "
                + ", ".join(map(str, head.layer_ids)),
                f"draft vocab   {head.draft_vocab} of {head.vocab} tokens",
                f"data          {settings.tokens:,} tokens of answers to {source}",
                f"training      {settings.epochs} epochs, at least {settings.max_steps or steps} steps of "
                f"{settings.batch_tokens} tokens, {settings.passes} passes",
                f"memory        about {memory / 1e9:.1f} GB beside the model's weights",
                f"device        {'GPU' if self.on_gpu else 'CPU'}",
            )
        )
