"""The configuration of a training run: a frozen dataclass for each TOML table, valid on its own, the root as a whole.

`load` reads a file and `--set` overrides. What depends on more than the file is checked by functions with that thing
as an argument: `check_world` (number of ranks), `check_model` (a Hugging Face config object), `check_environment`
(installed packages, files). `claim_run_dir` decides the run's folder. Nothing here imports torch, so a bad key fails
at once; the Hugging Face config itself is built in `integrations`.
"""

import importlib.metadata
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from moe_runtime.core.config import apply_overrides, from_mapping, read_toml, rest_field, unknown_key
from moe_runtime.core.errors import ConfigError
from moe_runtime.train.data import DataConfig
from moe_runtime.train.deadlines import WatchdogConfig

# The same quantity under the names that Hugging Face config classes give it, most common first.
EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")

# Read by the model code of many classes with a default, and declared by none of those.
_UNDECLARED_FIELDS = ("head_dim",)

RESUME_LATEST = "latest"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where the run lives. `dir` empty: the first free runs/<name>-<n>, `name` empty: the config file's stem.

    `resume`: empty (start anew), "latest" (the run folder's last checkpoint), a run folder, or one checkpoint's folder.
    `grace_seconds`: from SIGTERM or SIGUSR1 to the end of the process; until then it saves and stops.
    """

    dir: str = ""
    name: str = ""
    resume: str = ""
    seed: int = 0
    grace_seconds: int = 25

    def __post_init__(self) -> None:
        _check_range("run.seed", self.seed, 0, 2**63 - 1)
        _check_range("run.grace_seconds", self.grace_seconds, 1)
        if "/" in self.name or self.name in (".", ".."):
            raise ConfigError(f"run.name must be a plain name without '/', got '{self.name}'; run.dir takes a path")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Hugging Face MoE model: a config.json, or a `model_type` and the fields of its config class.

    `checkpoint`: a Hugging Face folder, or a checkpoint of a run, whose weights a new run starts from; the folder's own
    config.json serves where neither `config_file` nor `model_type` is given.
    Every other key of the table is such a field, checked against the class when the model is built; next to a
    config.json they replace values of that file.
    """

    config_file: str = ""
    model_type: str = ""
    checkpoint: str = ""
    fields: Mapping[str, object] = rest_field()

    def __post_init__(self) -> None:
        if self.config_file and self.model_type:
            got = f"'{self.config_file}' and '{self.model_type}'"
            raise ConfigError(f"expected exactly one of model.config_file and model.model_type, got {got}")
        if not (self.config_file or self.model_type or self.checkpoint):
            raise ConfigError("expected one of model.config_file, model.model_type and model.checkpoint, got none")
        if clash := {"config_file", "model_type", "checkpoint"} & self.fields.keys():
            raise ConfigError(f"model.fields must not repeat {sorted(clash)[0]}, a key of its own")

    @property
    def config_json(self) -> str:
        """The config.json that describes the model; empty where `model_type` does."""
        return self.config_file or ("" if self.model_type else str(Path(self.checkpoint) / "config.json"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Who multiplies: this package's grouped experts, or Hugging Face's own for comparison."""

    backend: Literal["grouped", "hf"] = "grouped"
    single_grouped_weight: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Load balancing: an auxiliary loss, and a bias on the router's scores moved by `bias_update_rate` a step."""

    aux_loss_coefficient: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        _check_range("router.aux_loss_coefficient", self.aux_loss_coefficient, 0.0)
        _check_range("router.bias_update_rate", self.bias_update_rate, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long and how much. `global_batch_size` counts sequences an optimizer step over all ranks and microbatches.

    `validate_every` and `checkpoint_every` count steps; 0 leaves validation out, and checkpoints only at the end.
    """

    steps: int
    global_batch_size: int
    microbatches: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    validate_every: int = 50
    validation_batches: int = 8
    checkpoint_every: int = 100
    activation_checkpointing: bool = False
    log_every: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "microbatches", "validation_batches", "log_every"):
            _check_range(f"train.{name}", getattr(self, name), 1)
        for name in ("validate_every", "checkpoint_every"):
            _check_range(f"train.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer and its schedule: linear warm-up to `lr`, then a cosine down to `min_lr_ratio * lr` at the end."""

    lr: float
    name: Literal["adamw", "sgd"] = "adamw"
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("optim.lr", self.lr)
        _check_positive("optim.eps", self.eps)
        _check_range("optim.min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            _check_range(f"optim.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"optim.{name} must be at least 0 and below 1, got {value}")
        if self.name != "sgd" and self.momentum:
            raise ConfigError(
                f"optim.momentum is read by optim.name = 'sgd' only, got {self.momentum} with '{self.name}'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the work: `expert` of the data-parallel ranks together hold one copy of the experts."""

    expert: int = 1
    data: Literal["fsdp2", "ddp", "none"] = "fsdp2"
    replicate: int = 1
    timeout_seconds: int = 600

    def __post_init__(self) -> None:
        for name in ("expert", "replicate", "timeout_seconds"):
            _check_range(f"parallel.{name}", getattr(self, name), 1)
        if self.data != "fsdp2" and self.replicate != 1:
            raise ConfigError(
                f"parallel.replicate applies to parallel.data = 'fsdp2' and must be 1 with '{self.data}', "
                f"got {self.replicate}"
            )
        if self.data == "none" and self.expert != 1:
            raise ConfigError(f"parallel.expert must be 1 with parallel.data = 'none', got {self.expert}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeConfig:
    """The precision of the experts' products, and of their stored weights: see docs/recipes.md.

    `quantized_weights` stores the weights themselves in the recipe's format, with fp32 masters in the optimizer;
    `omit_columnwise_weights` stores one direction of them only, which needs a `backward_override`. The three
    `disable_*` keys are NVFP4's.
    """

    name: Literal["high_precision", "float8", "fp8_block", "mxfp8", "nvfp4"] = "high_precision"
    backward_override: Literal["", "high_precision", "dequantized"] = ""
    quantized_weights: bool = True
    omit_columnwise_weights: bool = False
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        if self.name == "high_precision" and (self.backward_override or self.omit_columnwise_weights):
            key = "backward_override" if self.backward_override else "omit_columnwise_weights"
            raise ConfigError(f"recipe.{key} is read by recipes that quantize, got recipe.name = 'high_precision'")
        for key in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
            if getattr(self, key) and self.name != "nvfp4":
                raise ConfigError(f"recipe.{key} is read by recipe.name = 'nvfp4' only, got '{self.name}'")
        if self.omit_columnwise_weights and not (self.backward_override and self.quantized_weights):
            raise ConfigError(
                "recipe.omit_columnwise_weights needs recipe.backward_override and recipe.quantized_weights, got "
                f"'{self.backward_override}' and {str(self.quantized_weights).lower()}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WgradConfig:
    """When weight gradients of experts are computed: in their place, late in the same backward, or after it.

    `budget_mb` bounds the activations that deferred gradients hold, in MiB a rank; 0 is no bound.
    """

    schedule: Literal["inline", "late", "deferred"] = "inline"
    budget_mb: int = 0
    side_stream: bool = True

    def __post_init__(self) -> None:
        _check_range("wgrad.budget_mb", self.budget_mb, 0)
        if self.budget_mb and self.schedule != "deferred":
            raise ConfigError(
                f"wgrad.budget_mb is read by wgrad.schedule = 'deferred' only, got {self.budget_mb} "
                f"with '{self.schedule}'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How a checkpoint is written, and which stay: the `keep` newest (0: all) and every `keep_every`-th step (0: none).

    `asynchronous` keeps one copy of a rank's state in host memory and writes it while training goes on.
    """

    keep: int = 3
    keep_every: int = 0
    asynchronous: bool = True

    def __post_init__(self) -> None:
        _check_range("checkpoint.keep", self.keep, 0)
        _check_range("checkpoint.keep_every", self.keep_every, 0)
        if self.keep_every and not self.keep:
            raise ConfigError(
                "checkpoint.keep_every is read where checkpoint.keep removes old ones, got "
                f"{self.keep_every} with keep = 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardsConfig:
    """What is checked while training: see docs/operations.md.

    A step whose loss or gradient is not finite on any rank is skipped on all; the run stops at the `max_skipped`-th.
    A loss `spike_sigmas` standard deviations above the mean of recent ones is logged; 0 logs none. Every
    `replica_check_every` steps ranks compare checksums of what they hold alike; 0 never.
    """

    skip_nonfinite: bool = True
    max_skipped: int = 10
    spike_sigmas: float = 6.0
    replica_check_every: int = 0

    def __post_init__(self) -> None:
        _check_range("guards.max_skipped", self.max_skipped, 1)
        _check_range("guards.spike_sigmas", self.spike_sigmas, 0.0)
        _check_range("guards.replica_check_every", self.replica_check_every, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Where metrics go besides metrics.jsonl, which is always written; `phases_every` steps, the time of each phase."""

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "moe_runtime"
    phases_every: int = 50

    def __post_init__(self) -> None:
        _check_range("log.phases_every", self.phases_every, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """torch.profiler traces of steps [start_step, start_step + num_steps), and a memory snapshot on out-of-memory."""

    enabled: bool = False
    start_step: int = 5
    num_steps: int = 3
    memory_snapshot: bool = False

    def __post_init__(self) -> None:
        _check_range("profile.start_step", self.start_step, 1)
        _check_range("profile.num_steps", self.num_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole training run; valid in itself, for some number of ranks and some model."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    wgrad: WgradConfig = field(default_factory=WgradConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        if self.optim.warmup_steps > self.train.steps:
            raise ConfigError(
                f"optim.warmup_steps must be at most train.steps = {self.train.steps}, got {self.optim.warmup_steps}"
            )
        if self.train.global_batch_size % self.train.microbatches:
            raise ConfigError(
                f"train.global_batch_size must be a multiple of train.microbatches = {self.train.microbatches}, "
                f"got {self.train.global_batch_size}"
            )
        if self.experts.backend == "hf" and self.parallel.expert > 1:
            raise ConfigError(
                f"parallel.expert must be 1 with experts.backend = 'hf', which keeps every expert on every rank, "
                f"got {self.parallel.expert}"
            )
        if self.experts.backend == "hf" and self.wgrad.schedule != "inline":
            raise ConfigError(
                f"wgrad.schedule must be 'inline' with experts.backend = 'hf', whose gradients are its own, "
                f"got '{self.wgrad.schedule}'"
            )
        if self.experts.backend == "hf" and self.recipe.name != "high_precision":
            raise ConfigError(
                f"recipe.name must be 'high_precision' with experts.backend = 'hf', got '{self.recipe.name}'"
            )
        if self.watchdog.step_deadline(self.parallel.timeout_seconds) >= self.parallel.timeout_seconds:
            raise ConfigError(
                f"watchdog.seconds must be below parallel.timeout_seconds = {self.parallel.timeout_seconds}, "
                f"got {self.watchdog.seconds}"
            )
        last_profiled = self.profile.start_step + self.profile.num_steps - 1
        if self.profile.enabled and last_profiled > self.train.steps:
            raise ConfigError(
                f"profile.start_step + profile.num_steps - 1 must be at most train.steps = {self.train.steps}, "
                f"got {last_profiled}"
            )


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file with 'section.key=value' overrides; `run.name` defaults to the file's stem."""
    config = from_mapping(Config, apply_overrides(read_toml(path), overrides))
    return config if config.run.name else replace(config, run=replace(config.run, name=path.stem))


def check_world(config: Config, world_size: int) -> None:
    """Refuse a number of ranks that the parallel plan and the batch do not multiply to."""
    parallel, train = config.parallel, config.train
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    if parallel.data == "none" and world_size != 1:
        raise ConfigError(f"parallel.data = 'none' runs on 1 rank, got {ranks}; use 'fsdp2' or 'ddp'")
    if world_size % parallel.replicate:
        raise ConfigError(
            f"the number of ranks must be a multiple of parallel.replicate = {parallel.replicate}, got {ranks}"
        )
    shard = world_size // parallel.replicate
    if shard % parallel.expert:
        split = f" / parallel.replicate = {shard}" if parallel.replicate > 1 else ""
        raise ConfigError(
            f"the number of ranks{' / parallel.replicate' if split else ''} must be a multiple of "
            f"parallel.expert = {parallel.expert}, got {ranks}{split}"
        )
    if train.global_batch_size % (train.microbatches * world_size):
        raise ConfigError(
            f"train.global_batch_size must be a multiple of train.microbatches x ranks = {train.microbatches} x "
            f"{world_size} = {train.microbatches * world_size}, got {train.global_batch_size}"
        )


def check_model(config: Config, hf_config: object) -> None:
    """Refuse a model whose fields are unknown to its class, or whose experts, top-k or context do not fit the run.

    `hf_config` is any object with a Hugging Face config's attributes; of a composite one the text part counts.
    """
    _check_fields(config.model, hf_config)
    text_config = getattr(hf_config, "get_text_config", lambda: hf_config)()
    experts_name, num_experts = _first_attribute(text_config, EXPERT_COUNT_NAMES)
    top_k_name, top_k = _first_attribute(text_config, TOP_K_NAMES)
    model_type = getattr(text_config, "model_type", type(text_config).__name__)
    if num_experts is None:
        raise ConfigError(
            f"expected a mixture-of-experts model with one of {', '.join(EXPERT_COUNT_NAMES)} in its config, "
            f"got '{model_type}'"
        )
    # A few models give one number a layer; the tightest layer decides.
    fewest = min(num_experts) if isinstance(num_experts, list | tuple) else num_experts
    largest_k = max(top_k) if isinstance(top_k, list | tuple) else top_k
    if largest_k is not None and not 1 <= largest_k <= fewest:
        raise ConfigError(f"model.{top_k_name} must be in [1, {experts_name} = {fewest}], got {largest_k}")
    if fewest % config.parallel.expert:
        raise ConfigError(
            f"model.{experts_name} must be a multiple of parallel.expert = {config.parallel.expert}, got {fewest}"
        )
    context = getattr(text_config, "max_position_embeddings", None)
    if context is not None and config.data.seq_length > context:
        raise ConfigError(
            f"data.seq_length must be at most model.max_position_embeddings = {context}, got {config.data.seq_length}"
        )


def _check_fields(model: ModelConfig, hf_config: object) -> None:
    """Refuse a field that the config class only stored, because none of its own names takes it.

    A class converts some fields it does not declare (rope_theta); those leave no attribute of their name behind.
    """
    cls = type(hf_config)
    if not model.fields or getattr(cls, "has_no_defaults_at_init", False):
        return
    known = {*vars(cls()), *inspect.signature(cls).parameters, *getattr(cls, "attribute_map", {}), *_UNDECLARED_FIELDS}
    if model.config_json:
        known |= json.loads(Path(model.config_json).read_text(encoding="utf-8")).keys()
    names = [f"model.{name}" for name in sorted(known) if not name.startswith("_")]
    for name in model.fields:
        if name in vars(hf_config) and name not in known:
            raise unknown_key(f"model.{name}", names)


def check_environment(config: Config) -> None:
    """Refuse what this machine lacks: the model's files, a package that was asked for, a run to resume.

    A folder that already holds a run is refused too unless the run is resumed: its metrics and checkpoints are not
    overwritten.
    """
    model = config.model
    if model.config_file and not Path(model.config_file).is_file():
        raise ConfigError(f"model.config_file must be an existing config.json, got '{model.config_file}'")
    if model.checkpoint and not config.run.resume and not Path(model.checkpoint).is_dir():
        raise ConfigError(f"model.checkpoint must be an existing folder, got '{model.checkpoint}'")
    if model.config_json and not Path(model.config_json).is_file():
        raise ConfigError(
            f"expected the model's config at {model.config_json}, where no file is; name it in model.config_file"
        )
    if config.log.wandb and not _is_installed("wandb"):
        raise ConfigError("log.wandb = true needs the wandb package, which is not installed: pip install wandb")
    if config.run.resume not in ("", RESUME_LATEST) and not Path(config.run.resume).is_dir():
        raise ConfigError(f"run.resume must be 'latest' or an existing folder, got '{config.run.resume}'")
    folder = named_run_dir(config)
    if folder is None:
        return
    if config.run.resume == RESUME_LATEST and not folder.is_dir():
        raise ConfigError(f"nothing to resume: the run folder '{folder}' does not exist")
    if not config.run.resume and _holds_run(folder):
        raise ConfigError(f"run.dir '{folder}' already holds a run; resume it with --resume or name another folder")


def claim_run_dir(config: Config) -> Path:
    """The run's folder, created; call it on one rank only, after `check_environment`.

    It is `run.dir` where given, the resumed run's own folder, else the first free runs/<name>-<n> with n from 1. A run
    started from a single checkpoint's folder gets a folder of its own, so that the source stays as it is.
    """
    folder = named_run_dir(config)
    try:
        if folder is None:
            return _make_first_free(_runs_root(), _run_name(config))
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError as error:
        raise ConfigError(f"cannot create the run folder '{error.filename}': {error.strerror}") from error


def newest_run(name: str, *, holding: str = "") -> Path | None:
    """The folder runs/<name>-<n> written last, or None; of those that hold a file of that pattern, if given."""
    runs = [path for path in _runs_root().glob("*") if _number_of(path, name) is not None]
    if holding:
        runs = [path for path in runs if next(path.glob(holding), None) is not None]
    return max(runs, key=_last_written) if runs else None


def _make_first_free(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = root / f"{name}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # taken, perhaps this instant by another job
            number += 1


def named_run_dir(config: Config) -> Path | None:
    """The folder that `run.dir` or `run.resume` names, or None where a new one must be numbered."""
    if config.run.dir:
        return Path(config.run.dir)
    if config.run.resume == RESUME_LATEST:
        name = _run_name(config)
        newest = newest_run(name)
        if newest is None:
            raise ConfigError(f"nothing to resume: no folder {_runs_root() / name}-<n> exists")
        return newest
    if config.run.resume and _holds_run(Path(config.run.resume)):
        return Path(config.run.resume)
    return None


def run_folders(config: Config) -> list[Path]:
    """Folders that may hold earlier starts of this run: `run.dir`, else those of its name, the newest last."""
    if config.run.dir:
        return [folder for folder in (Path(config.run.dir),) if folder.is_dir()]
    name = _run_name(config)
    numbers = {path: _number_of(path, name) for path in _runs_root().glob("*")}
    return sorted((path for path, number in numbers.items() if number is not None), key=lambda path: numbers[path] or 0)


def _runs_root() -> Path:
    return Path("runs")


def _run_name(config: Config) -> str:
    return config.run.name or "run"


def _number_of(path: Path, name: str) -> int | None:
    """n of a folder <name>-<n>, None for any other path."""
    prefix, _, number = path.name.rpartition("-")
    return int(number) if prefix == name and number.isdecimal() and path.is_dir() else None


def _last_written(folder: Path) -> float:
    metrics = folder / "metrics.jsonl"
    return (metrics if metrics.exists() else folder).stat().st_mtime


def _holds_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()


def _first_attribute(config: object, names: Sequence[str]) -> tuple[str, int | list[int] | None]:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return name, value
    return names[0], None


def _is_installed(distribution: str) -> bool:
    # Not find_spec: a folder of that name in the working directory (W&B leaves one) would count as the package.
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_range(name: str, value: float, minimum: float, maximum: float = math.inf) -> None:
    """Refuse a value outside [minimum, maximum]; infinity and NaN are never inside."""
    if not (minimum <= value <= maximum and math.isfinite(value)):
        bound = f"finite and at least {minimum}" if maximum == math.inf else f"in [{minimum}, {maximum}]"
        raise ConfigError(f"{name} must be {bound}, got {value}")


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, got {value}")
