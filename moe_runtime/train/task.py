"""What a run trains, apart from how: the loop asks a task for a trainee, for what belongs in a checkpoint, and for what
comes before the first step and after the last.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_runtime.core.config import to_toml
from moe_runtime.train.config import Config
from moe_runtime.train.setup import Trainee, build
from moe_runtime.train.step import Stepper


class Task:
    """Train every parameter of a new model. Every rank calls each method at the same point."""

    def build(self, config: Config, hf_config: Any, device: torch.device) -> Trainee:
        """The model and its optimizer."""
        return build(config, hf_config, device)

    def config_text(self, config: Config, folder: Path) -> str:
        """What the run folder's config.toml holds: enough to do the same again."""
        return to_toml(replace(config, run=replace(config.run, dir=str(folder), resume="")))

    def facts(self, config: Config) -> dict[str, Any]:
        """JSON values that a checkpoint keeps beside its tensors."""
        return {"seed": config.run.seed, "global_batch_size": config.train.global_batch_size}

    def check_resumed(self, facts: Mapping[str, Any], source: Path) -> None:
        """CheckpointError where a checkpoint with these facts is not one of this task's."""

    def begin(self, stepper: Stepper, folder: Path, first_step: int) -> None:
        """Before the first step, the checkpoint loaded."""

    def finish(self, stepper: Stepper, folder: Path) -> None:
        """After the last step, its checkpoint saved."""
