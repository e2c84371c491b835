"""The training loop: build, resume, step, validate, save. What happens inside a step is in step.py."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_runtime import checkpoint
from moe_runtime.comm.bootstrap import Launch, init_process_group, local_device, shutdown
from moe_runtime.core.device import peak_bf16_flops, peak_process_bytes
from moe_runtime.core.log import get_logger
from moe_runtime.train.config import RESUME_LATEST, TOP_K_NAMES, Config
from moe_runtime.train.data.cache import PreparedData
from moe_runtime.train.data.packing import PackedSplit, PreparedInstructions
from moe_runtime.train.data.sampler import Sampler
from moe_runtime.train.data.tokens import Batch, TokenSplit
from moe_runtime.train.elastic import claim, resume_from
from moe_runtime.train.guards import Guards
from moe_runtime.train.metrics import MetricsWriter, StepMetrics, max_over_mean, open_wandb
from moe_runtime.train.phases import PhaseObserver, Phases
from moe_runtime.train.profiling import profiled
from moe_runtime.train.saving import Saver
from moe_runtime.train.setup import Trainee, forward_flops_per_token, learning_rate
from moe_runtime.train.signals import StopSignals
from moe_runtime.train.slow_ranks import SlowRanks
from moe_runtime.train.step import Stepper, StepResult, Votes
from moe_runtime.train.task import Task
from moe_runtime.train.watching import Watch, watched

TOKENIZER_FILE = "tokenizer.json"

_LOGGER = get_logger(__name__)

Data = PreparedData | PreparedInstructions
Split = TokenSplit | PackedSplit


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What every phase of the loop needs."""

    config: Config
    launch: Launch
    data: Data
    task: Task
    folder: Path
    trainee: Trainee
    stepper: Stepper
    phases: Phases
    first_step: int
    skipped: int
    flops_per_token: float

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class _Stream:
    """This rank's rows of one split, step by step."""

    split: Split
    sampler: Sampler
    seq_length: int
    num_microbatches: int
    dp_rank: int
    dp_size: int

    def sequences(self, step: int) -> list[list[int]]:
        """Their ids, a list a microbatch."""
        return [
            self.sampler.microbatch(
                step, index, num_microbatches=self.num_microbatches, dp_rank=self.dp_rank, dp_size=self.dp_size
            ).tolist()
            for index in range(self.num_microbatches)
        ]

    def batches(self, step: int) -> list[Batch]:
        """The microbatches of a step."""
        return [self.split.sequences(np.array(ids), self.seq_length) for ids in self.sequences(step)]

    def num_labels(self, step: int) -> int:
        """Tokens to learn in the whole batch of a step, over all ranks."""
        return self.split.num_labels(self.sampler.indices(step), self.seq_length)


def run(
    config: Config,
    launch: Launch,
    hf_config: Any,
    data: Data,
    *,
    task: Task | None = None,
    observer: PhaseObserver | None = None,
) -> Path:
    """Train by `config`; returns the run folder. Every rank calls it with the same arguments.

    `task` says what trains, by default all of a new model; `observer` hears of every phase on this rank.
    Raises CheckpointError for a checkpoint that cannot be written, read, or that belongs to another model, and
    NumericsError where `guards` says to stop. SIGTERM or SIGUSR1 to any rank makes all of them save and return.
    """
    device = local_device(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.parallel.data != "none":
        init_process_group(launch, device_type=device.type, timeout_seconds=config.parallel.timeout_seconds)
    try:
        config, folder = _claim(config, launch)
        with watched(config, folder, observer) as watch:
            return _train(_prepare(config, launch, hf_config, data, task or Task(), folder, watch))
    finally:
        shutdown()


def _claim(config: Config, launch: Launch) -> tuple[Config, Path]:
    """The run's folder, and what to resume now that it is known whether a restarted run has saved anything."""
    folder = Path(_from_first_rank(str(claim(config, launch)) if launch.is_main else ""))
    resume = _from_first_rank(resume_from(config, folder, launch) if launch.is_main else "")
    return replace(config, run=replace(config.run, resume=resume)), folder


def _prepare(
    config: Config, launch: Launch, hf_config: Any, data: Data, task: Task, folder: Path, watch: Watch
) -> _Run:
    torch.manual_seed(config.run.seed + launch.rank)
    trainee = task.build(config, hf_config, local_device(launch))
    watch.name_layers(trainee.inner, trainee.layout)
    phases = Phases(watch)
    facts = _resume(config, folder, trainee, task)
    if launch.is_main:
        (folder / "config.toml").write_text(task.config_text(config, folder))
        hf_config.to_json_file(folder / "model.json")
        (folder / TOKENIZER_FILE).write_bytes(data.tokenizer_path.read_bytes())
    top_k = hf_top_k(hf_config)
    return _Run(
        config=config,
        launch=launch,
        data=data,
        task=task,
        folder=folder,
        trainee=trainee,
        stepper=Stepper(config, trainee, phases),
        phases=phases,
        first_step=facts["step"],
        skipped=facts.get("skipped_steps", 0),
        flops_per_token=3 * forward_flops_per_token(trainee.model, trainee.layout, trainee.num_experts, top_k),
    )


def _train(run: _Run) -> Path:
    config = run.config
    stream = _stream(run, train=True)
    _describe(run)
    run.task.begin(run.stepper, run.folder, run.first_step)
    guards, slow_ranks = _guards(run, stream), _slow_ranks(run)
    with (
        _metrics(run) as metrics,
        profiled(config.profile, run.folder, run.launch.rank) as after_step,
        _saver(run) as saver,
        StopSignals(grace_seconds=config.run.grace_seconds) as signals,
    ):
        for step in range(run.first_step, config.train.steps):
            started, done = time.perf_counter(), step + 1
            run.phases.start_step(done)
            with run.phases("data"):
                batches = stream.batches(step)
            lr = learning_rate(config.optim, step, config.train.steps)
            votes = Votes(stop=signals.received is not None, look_at_save=saver.has_failed)
            result = run.stepper.step(batches, lr, votes, num_labels=stream.num_labels(step))
            seconds = time.perf_counter() - started
            row = _row(run, done, result, lr, seconds, _validation(run, done))
            metrics.write(row, line=done % config.train.log_every == 0 or done == config.train.steps)
            metrics.append_load(done, result.load_LE.numpy())
            after_step()
            guards.after_step(done, result.loss, result.grad_norm, result.skipped)
            is_last = done == config.train.steps or result.votes.stop
            if result.votes.look_at_save:
                saver.wait()
            if is_last or (config.train.checkpoint_every and done % config.train.checkpoint_every == 0):
                _save(run, saver, done, guards.skipped, wait=is_last)
            if config.log.phases_every and (done % config.log.phases_every == 0 or is_last):
                slow_ranks.record(done, (done - run.first_step - 1) % config.log.phases_every + 1, run.phases.take())
            if result.votes.stop and done < config.train.steps:
                asked = f"on {signals.received.name}" if signals.received else "because another rank was asked to"
                _LOGGER.warning("stopped after step %d of %d, saved, %s", done, config.train.steps, asked)
                break
        else:
            run.task.finish(run.stepper, run.folder)
    return run.folder


def _guards(run: _Run, stream: _Stream) -> Guards:
    return Guards(
        run.config.guards,
        run.folder,
        run.trainee,
        sequences=stream.sequences,
        skipped=run.skipped,
        resumed_step=run.first_step or None,
    )


def _slow_ranks(run: _Run) -> SlowRanks:
    return SlowRanks(run.folder, is_main=run.launch.is_main, resumed_step=run.first_step or None)


def _saver(run: _Run) -> Saver:
    config = run.config
    return Saver(run.checkpoints, run.trainee, config.checkpoint, timeout_seconds=config.parallel.timeout_seconds)


def _stream(run: _Run, *, train: bool) -> _Stream:
    config = run.config
    split = run.data.train if train else run.data.validation
    # A validation batch is as large as a training microbatch, which is known to fit.
    microbatches = config.train.microbatches if train else 1
    size = config.train.global_batch_size // config.train.microbatches * microbatches
    return _Stream(
        split=split,
        seq_length=config.data.seq_length,
        num_microbatches=microbatches,
        dp_rank=run.launch.rank,
        dp_size=run.trainee.layout.data_parallel_size,
        sampler=Sampler(
            num_sequences=split.num_sequences(config.data.seq_length),
            global_batch_size=size,
            seed=config.run.seed if train else 0,
        ),
    )


def _validation(run: _Run, done: int) -> float | None:
    """The validation loss after `done` steps, where one is due: the same sequences every time."""
    every = run.config.train.validate_every
    if not every or not (done == 1 or done % every == 0 or done == run.config.train.steps):
        return None
    stream = _stream(run, train=False)
    with run.phases("validate"):
        return run.stepper.evaluate(
            [batch for index in range(run.config.train.validation_batches) for batch in stream.batches(index)]
        )


def _row(run: _Run, done: int, result: StepResult, lr: float, seconds: float, val_loss: float | None) -> StepMetrics:
    config, device = run.config, run.trainee.device
    tokens = config.train.global_batch_size * config.data.seq_length
    memory, mfu = peak_process_bytes(), None
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        peak = peak_bf16_flops(torch.cuda.get_device_name(device))
        if peak is not None and config.train.dtype == "bfloat16":
            mfu = run.flops_per_token * tokens / seconds / (peak * run.launch.world_size)
    return StepMetrics(
        step=done,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        tokens_per_second=tokens / seconds,
        step_seconds=seconds,
        memory_bytes=memory,
        expert_load_max_over_mean=max_over_mean(result.load_LE.numpy()),
        val_loss=val_loss,
        aux_loss=result.aux_loss,
        mfu=mfu,
    )


def _metrics(run: _Run) -> MetricsWriter:
    config = run.config
    wandb_run = None
    if config.log.wandb and run.launch.is_main:
        wandb_run = open_wandb(run.folder, project=config.log.wandb_project, config=asdict(config))
    return MetricsWriter(
        run.folder,
        is_main=run.launch.is_main,
        total_steps=config.train.steps,
        tensorboard=config.log.tensorboard,
        wandb_run=wandb_run,
        resumed_step=run.first_step or None,
    )


def _save(run: _Run, saver: Saver, done: int, skipped: int, *, wait: bool) -> None:
    config = run.config
    facts = {**run.task.facts(config), "skipped_steps": skipped}
    with run.phases("save"):
        saver.save(done, facts)
        if wait:
            saver.wait()


def _resume(config: Config, folder: Path, trainee: Trainee, task: Task) -> dict[str, Any]:
    """Load what the configuration resumes, if anything; what its checkpoint says, with "step", the steps done."""
    if not config.run.resume:
        return {"step": 0}
    source = folder if config.run.resume == RESUME_LATEST else Path(config.run.resume)
    if (source / "manifest.json").is_file():
        facts = checkpoint.load(source, trainee.model, trainee.optimizer)
    else:
        source, facts = checkpoint.load_latest(source / "checkpoints", trainee.model, trainee.optimizer)
    task.check_resumed(facts, source)
    _LOGGER.info("resumed after step %d from %s", facts["step"], source)
    return facts


def hf_top_k(hf_config: Any) -> int:
    """Experts a token is sent to, by the name that this config class gives it."""
    from_text = getattr(hf_config, "get_text_config", lambda: hf_config)()
    for name in TOP_K_NAMES:
        if isinstance(value := getattr(from_text, name, None), int):
            return value
    return 1


def _describe(run: _Run) -> None:
    trainee, layout = run.trainee, run.trainee.layout
    total = sum(
        p.numel() * (layout.expert if name.removeprefix("module.") in layout.expert_parameters else 1)
        for name, p in trainee.model.named_parameters()
    )
    _LOGGER.info(
        "%s: %.1f M parameters, %d MoE layers of %d experts; %d ranks: expert %d, data %s; "
        "%d training tokens; run folder %s",
        type(trainee.inner).__name__.removeprefix("FSDP"),
        total / 1e6,
        trainee.num_moe_layers,
        trainee.num_experts,
        run.launch.world_size,
        layout.expert,
        layout.data,
        run.data.train.num_tokens,
        run.folder,
    )


def _from_first_rank(value: str) -> str:
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
