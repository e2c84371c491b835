"""The configuration of a fine-tuning run: adapters that train on a frozen base. Tables it shares with training are the
same dataclasses; `as_training` gives the loop its view of them. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moe_runtime.core.config import apply_overrides, from_mapping, read_toml, to_toml
from moe_runtime.core.errors import ConfigError
from moe_runtime.train.config import (
    CheckpointConfig,
    Config,
    GuardsConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ProfileConfig,
    RecipeConfig,
    RunConfig,
    TrainConfig,
    WgradConfig,
    newest_run,
)
from moe_runtime.train.data import DataConfig
from moe_runtime.train.data.instructions import InstructionConfig

MODEL_FILE, CONFIG_FILE, MANIFEST, CHECKPOINTS = "model.json", "config.json", "manifest.json", "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseConfig:
    """The model that stays as it is.

    path  a Hugging Face folder, a run's folder (its newest checkpoint), or one checkpoint's folder
    run   in its place a name: the newest folder runs/<name>-<n>
    """

    path: str = ""
    run: str = ""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.run):
            got = f"'{self.path}' and '{self.run}'" if self.path else "neither"
            raise ConfigError(f"expected exactly one of base.path and base.run, got {got}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """What trains beside the base's weights: W x + scale B A x, of rank `rank`.

    alpha           scale = alpha / rank, or alpha / sqrt(rank) with `use_rslora`
    share_outer     experts share the outer factor: A of what enters them, B of what leaves
    target_modules  names, or ends of dotted names: "gate_up" and "down" are the experts' products; others are ordinary
                    linear layers, such as "q_proj", which need the peft package
    """

    rank: int = 16
    alpha: float = 32.0
    use_rslora: bool = False
    dropout: float = 0.0
    share_outer: bool = False
    target_modules: tuple[str, ...] = ("gate_up", "down")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank must be at least 1, got {self.rank}")
        if not self.alpha > 0:
            raise ConfigError(f"lora.alpha must be positive, got {self.alpha}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.target_modules:
            raise ConfigError("lora.target_modules must name a module, got none")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """A whole fine-tuning run; valid in itself, for some number of ranks and some base."""

    run: RunConfig = field(default_factory=RunConfig)
    base: BaseConfig
    data: InstructionConfig = field(default_factory=InstructionConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    wgrad: WgradConfig = field(default_factory=WgradConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        as_training(self)  # what training refuses is refused here


def as_training(config: FinetuneConfig, model_file: Path = Path(CONFIG_FILE)) -> Config:
    """The loop's view: everything that it reads, with the base's config file as the model."""
    return Config(
        run=config.run,
        data=DataConfig(seq_length=config.data.seq_length),
        model=ModelConfig(config_file=str(model_file)),
        train=config.train,
        optim=config.optim,
        parallel=config.parallel,
        recipe=config.recipe,
        wgrad=config.wgrad,
        checkpoint=config.checkpoint,
        guards=config.guards,
        log=config.log,
        profile=config.profile,
    )


def load(path: Path, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """The config of a TOML file with 'section.key=value' overrides; `run.name` defaults to the file's stem."""
    config = from_mapping(FinetuneConfig, apply_overrides(read_toml(path), overrides))
    return config if config.run.name else replace(config, run=replace(config.run, name=path.stem))


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFiles:
    """Where a base's parts are. `checkpoint` is None for a Hugging Face folder, whose weights are `folder`'s own.

    config_file  of the model
    tokenizer    a file or folder; None where there is none
    """

    folder: Path
    config_file: Path
    checkpoint: Path | None
    tokenizer: Path | None


def find_base(config: BaseConfig) -> BaseFiles:
    """The files of the base; ConfigError for a folder that is none."""
    whole = f"{CHECKPOINTS}/step-*/{MANIFEST}"
    folder = newest_run(config.run, holding=whole) if config.run else Path(config.path)
    if folder is None:
        raise ConfigError(
            f"base.run '{config.run}' must name a run with a checkpoint, got no such folder runs/{config.run}-<n>: "
            "train one first"
        )
    run = folder.parent.parent if (folder / MANIFEST).is_file() else folder
    if (run / MODEL_FILE).is_file():
        checkpoint = folder if folder != run else _newest_checkpoint(run)
        return BaseFiles(
            folder=run,
            config_file=run / MODEL_FILE,
            checkpoint=checkpoint,
            tokenizer=_existing(run / "tokenizer.json"),
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"base.path must be a Hugging Face folder with a {CONFIG_FILE}, a run's folder with a {MODEL_FILE}, or one "
            f"of its checkpoints, got '{folder}'"
        )
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    return BaseFiles(
        folder=folder,
        config_file=folder / CONFIG_FILE,
        checkpoint=None,
        tokenizer=folder if has_tokenizer else None,
    )


def _newest_checkpoint(run: Path) -> Path:
    """By name, as checkpoints are numbered; whether it is whole and undamaged is seen when it is read."""
    found = sorted(path.parent for path in (run / CHECKPOINTS).glob(f"step-*/{MANIFEST}"))
    if not found:
        raise ConfigError(f"the base '{run}' must hold a checkpoint, got none in {run / CHECKPOINTS}")
    return found[-1]


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def config_text(config: FinetuneConfig, base: BaseFiles, folder: Path) -> str:
    """The run folder's config.toml: the same run again, on the base that it had."""
    return to_toml(
        replace(
            config,
            run=replace(config.run, dir=str(folder), resume=""),
            base=BaseConfig(path=str(base.checkpoint or base.folder)),
        )
    )
