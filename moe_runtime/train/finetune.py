"""Fine-tuning as a task of the training loop: a frozen base, adapters that train, and what they brought."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moe_runtime import checkpoint
from moe_runtime.checkpoint import hf as folders
from moe_runtime.comm.layout import layout_of
from moe_runtime.core.device import process_bytes
from moe_runtime.core.errors import CheckpointError, ConfigError
from moe_runtime.core.log import get_logger
from moe_runtime.integrations import transformers as hf
from moe_runtime.integrations.peft import add_lora, check_frozen_base, export_peft
from moe_runtime.nn import LoRAConfig
from moe_runtime.parallel import ParallelPlan, distribute
from moe_runtime.precision import quantized_model_init
from moe_runtime.train.config import RESUME_LATEST, Config
from moe_runtime.train.data.packing import PackedSplit, PreparedInstructions
from moe_runtime.train.data.tokens import IGNORED, Batch
from moe_runtime.train.finetune_config import BaseFiles, FinetuneConfig, config_text
from moe_runtime.train.metrics import METRICS_FILE
from moe_runtime.train.setup import DTYPES, Trainee, make_coordinator, make_optimizer, recipe_of
from moe_runtime.train.step import Stepper
from moe_runtime.train.task import Task

RESULT_FILE, ADAPTER_FOLDER = "finetune.json", "adapter"

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_LOGGER = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run brought. Losses in nats a learned token over all held-out samples; bytes on rank 0.

    planned_bytes   what the plan says that the process grows by; measured_bytes: what it did
    """

    held_out_loss_before: float
    held_out_loss_after: float
    planned_bytes: int
    measured_bytes: int

    @property
    def reduction(self) -> float:
        """Share of the loss that is gone."""
        return 1.0 - self.held_out_loss_after / self.held_out_loss_before


class Finetune(Task):
    """Train adapters on the frozen base `base`. Of a run that is resumed, the loss before is read back."""

    def __init__(
        self, config: FinetuneConfig, base: BaseFiles, data: PreparedInstructions, *, planned_bytes: int
    ) -> None:
        self.config, self.base, self.data, self.planned_bytes = config, base, data, planned_bytes
        self.outcome: Outcome | None = None
        self._base_id = base_fingerprint(base)
        self._before = float("nan")
        self._bytes_at_start = self._first_step = 0

    def build(self, config: Config, hf_config: Any, device: torch.device) -> Trainee:
        """The base, loaded and frozen, with adapters, and an optimizer of theirs."""
        self._bytes_at_start = torch.cuda.memory_allocated(device) if device.type == "cuda" else process_bytes()
        model = meta_model(self.config, hf_config)
        if config.train.activation_checkpointing:
            hf.enable_activation_checkpointing(model)
        recorder = hf.RoutingRecorder(model)
        sharded, dtype = config.parallel.data == "fsdp2", DTYPES[config.train.dtype]
        coordinator = make_coordinator(config.wgrad)
        # One dtype for what is sharded together: adapters are of the base's dtype, their masters fp32.
        plan = ParallelPlan(
            expert=config.parallel.expert,
            data=config.parallel.data,
            replicate=config.parallel.replicate,
            reduce_dtype=torch.float32 if sharded and dtype != torch.float32 else None,
        )
        shard_first = sharded and not getattr(hf_config, "tie_word_embeddings", False)
        wrapped = distribute(model, plan, coordinator) if shard_first else None
        folders.load(model, self.base.checkpoint or self.base.folder, device=device)
        wrapped = wrapped if wrapped is not None else distribute(model, plan, coordinator)
        checkpoint.leave_out_frozen(wrapped)
        optimizer = make_optimizer(config.optim, wrapped, dtype != torch.float32)
        if coordinator is not None:
            coordinator.guard(optimizer)
        return Trainee(
            model=wrapped,
            inner=model,
            optimizer=optimizer,
            layout=layout_of(wrapped),
            recorder=recorder,
            device=device,
            num_experts=hf.num_experts(model),
            num_moe_layers=len(hf.experts_modules(model)),
        )

    def config_text(self, config: Config, folder: Path) -> str:
        return config_text(self.config, self.base, folder)

    def facts(self, config: Config) -> dict[str, Any]:
        return {
            **super().facts(config),
            "base": self._base_id,
            "data": self.data.fingerprint,
            "held_out_loss_before": self._before,
        }

    def check_resumed(self, facts: Mapping[str, Any], source: Path) -> None:
        check_facts(facts, source, base_id=self._base_id, base=self.base, data=self.data.fingerprint)
        self._before = float(facts["held_out_loss_before"])

    def begin(self, stepper: Stepper, folder: Path, first_step: int) -> None:
        self._first_step = first_step
        if np.isnan(self._before):
            self._before = held_out_loss(stepper, self.data.validation, self.config.train.global_batch_size)
            _LOGGER.info("held-out loss before: %.4f", self._before)

    def finish(self, stepper: Stepper, folder: Path) -> None:
        trainee = stepper.trainee
        after = held_out_loss(stepper, self.data.validation, self.config.train.global_batch_size)
        if trainee.layout.rank == 0:
            self.outcome = Outcome(
                held_out_loss_before=self._before,
                held_out_loss_after=after,
                planned_bytes=self.planned_bytes,
                measured_bytes=_peak_of_steps(folder, self._first_step) - self._bytes_at_start,
            )
            _write_outcome(folder, self.outcome)
            # Of a run that was finished before and is resumed.
            shutil.rmtree(folder / ADAPTER_FOLDER, ignore_errors=True)
        export_peft(trainee.model, folder / ADAPTER_FOLDER, base=str(self.base.checkpoint or self.base.folder))


def meta_model(config: FinetuneConfig, hf_config: Any) -> Any:
    """The base on meta, its experts as the recipe stores them, frozen, with the adapters that train.

    ConfigError for adapters that it cannot have: unknown names, a rank that a layer is too small for.
    """
    recipe = recipe_of(config.recipe)
    with quantized_model_init(
        enabled=recipe.quantizes and config.recipe.quantized_weights,
        recipe=recipe,
        omit_columnwise_primary_weight_storage=config.recipe.omit_columnwise_weights,
    ):
        model = hf.build(
            hf_config,
            delay_wgrad_compute=config.wgrad.schedule == "deferred",
            dtype=DTYPES[config.train.dtype],
        )
    adapters = {field.name: getattr(config.lora, field.name) for field in fields(config.lora)}
    try:
        add_lora(model, LoRAConfig(**adapters, seed=config.run.seed))
        check_frozen_base(model)
    except ValueError as error:
        raise ConfigError(f"[lora] {error}") from error
    _check_data_parallel(config, model)
    return model


def _check_data_parallel(config: FinetuneConfig, model: nn.Module) -> None:
    if config.parallel.data != "ddp" or config.parallel.expert == 1:
        return
    experts = tuple(f"{name}." for name in hf.experts_modules(model))
    if not any(p.requires_grad and not name.startswith(experts) for name, p in model.named_parameters()):
        raise ConfigError(
            "parallel.data = 'ddp' with parallel.expert > 1 leaves DDP nothing to reduce where only experts have "
            f"adapters: expected a target such as 'q_proj', or 'fsdp2', got {', '.join(config.lora.target_modules)}"
        )


# ---- what a run may be resumed from ----


def base_fingerprint(base: BaseFiles) -> str:
    """64 hex digits that tell one base's weights from another's.

    Of a checkpoint its files' checksums; of a Hugging Face folder each weight file's size and samples of its bytes, as
    reading a large one whole takes minutes.
    """
    digest = hashlib.sha256()
    if base.checkpoint is not None:
        manifest = json.loads((base.checkpoint / "manifest.json").read_bytes())
        digest.update(json.dumps(manifest["files"], sort_keys=True).encode())
        return digest.hexdigest()
    for path in sorted(base.folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(part * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_facts(facts: Mapping[str, Any], source: Path, *, base_id: str, base: BaseFiles, data: str) -> None:
    """CheckpointError where a checkpoint's adapters are another base's, or its data position is in other data."""
    if facts.get("base") != base_id:
        got = str(facts["base"])[:12] if "base" in facts else "no adapters of a fine-tuning run"
        raise CheckpointError(
            f"{source} belongs to another base: expected adapters of {base.checkpoint or base.folder} "
            f"({base_id[:12]}), got {got}"
        )
    if facts.get("data") != data:
        raise CheckpointError(
            f"{source} stands at a position in other data: expected instructions, tokenizer and packing "
            f"{data[:12]}, got {str(facts.get('data'))[:12]}"
        )


def check_resume(config: FinetuneConfig, folder: Path | None, base: BaseFiles, data: PreparedInstructions) -> None:
    """`check_facts` of what will be resumed, before anything is built. `folder` is the run's, where it is known."""
    if not config.run.resume:
        return
    source = folder if config.run.resume == RESUME_LATEST else Path(config.run.resume)
    if source is None:
        return
    found = source if (source / "manifest.json").is_file() else checkpoint.latest(source / "checkpoints")
    if found is not None:
        facts = checkpoint.read_facts(found)
        check_facts(facts, found, base_id=base_fingerprint(base), base=base, data=data.fingerprint)


# ---- measuring ----


def held_out_loss(stepper: Stepper, split: PackedSplit, batch_size: int) -> float:
    """Mean loss a learned token over every held-out sample once, in nats; the same on every rank."""
    layout = stepper.trainee.layout
    rows = max(batch_size // layout.data_parallel_size, 1)
    return stepper.evaluate(list(_every_row(split, rows, layout.rank, layout.data_parallel_size)))


def _every_row(split: PackedSplit, rows: int, rank: int, size: int) -> Iterator[Batch]:
    """This rank's share of all rows in batches, as many on every rank: filled up with rows that are not learned."""
    count = split.num_sequences(split.seq_length)
    for start in range(0, count, rows * size):
        wanted = start + rank * rows + np.arange(rows)
        batch = split.sequences(wanted % count, split.seq_length)
        batch.labels_BS[torch.from_numpy(wanted >= count)] = IGNORED
        yield batch


def _peak_of_steps(folder: Path, first_step: int) -> int:
    """The largest memory_bytes of this process's steps: resident on a CPU, allocated by torch on a GPU."""
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    held = [row["memory_bytes"] for line in lines if (row := json.loads(line))["step"] > first_step]
    return max(held, default=0)


def _write_outcome(folder: Path, outcome: Outcome) -> None:
    values = {
        "held_out_loss_before": outcome.held_out_loss_before,
        "held_out_loss_after": outcome.held_out_loss_after,
        "reduction": outcome.reduction,
        "planned_bytes": outcome.planned_bytes,
        "measured_bytes": outcome.measured_bytes,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }
    (folder / RESULT_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _LOGGER.info(
        "held-out loss %.4f, before %.4f: %.1f %% lower; memory grew by %.2f GiB, planned %.2f GiB",
        outcome.held_out_loss_after,
        outcome.held_out_loss_before,
        100 * outcome.reduction,
        outcome.measured_bytes / 2**30,
        outcome.planned_bytes / 2**30,
    )
