"""The convert command: Hugging Face folders and runs' checkpoints, each made of the other, in one process.

folder -> folder             the other name style, another dtype, dequantized
dense folder -> folder       upcycled into a mixture of experts
run or checkpoint -> folder  the weights of its newest checkpoint
folder -> run                a checkpoint of step 0, which a run of that configuration resumes
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from moe_runtime import checkpoint
from moe_runtime.checkpoint import hf
from moe_runtime.checkpoint.tensors import create_optimizer_state, split_member
from moe_runtime.cli.exits import FAILED, INTERRUPTED, USAGE, fail
from moe_runtime.comm.bootstrap import Launch, init_process_group, shutdown
from moe_runtime.core.config import from_mapping, to_toml
from moe_runtime.core.errors import CheckpointError, ConfigError, UnsupportedError
from moe_runtime.integrations import transformers as models
from moe_runtime.optim import MasterWeights
from moe_runtime.train import setup
from moe_runtime.train.config import Config, ModelConfig
from moe_runtime.train.config import load as load_run_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MANIFEST, _MODEL_FILE, _RUN_FILE, _CHECKPOINTS = "manifest.json", "model.json", "config.toml", "checkpoints"


def convert(
    source: str,
    destination: str,
    *,
    style: str,
    dtype: str,
    shard_gb: float,
    upcycle: str,
    config: str,
    ignore: Sequence[str],
) -> int:
    """Convert; the exit code is 0, 2 for arguments or configs that cannot be, 1 for folders that cannot be read or
    written. Other errors are defects and keep their traceback.

    dtype, upcycle, config  empty where they are not asked for
    """
    try:
        options = _options(style, dtype, shard_gb, ignore)
        written = _convert(Path(source), Path(destination), options, upcycle, config)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        return fail(str(error), code=USAGE)
    except (CheckpointError, UnsupportedError) as error:
        return fail(str(error), code=FAILED)
    except ImportError as error:
        if error.name is not None:
            raise
        return fail(str(error), code=USAGE)
    print(written)
    return 0


def _options(style: str, dtype: str, shard_gb: float, ignore: Sequence[str]) -> hf.SaveOptions:
    if style not in hf.STYLES:
        raise ConfigError(f"--style must be one of {', '.join(hf.STYLES)}, got {style!r}")
    if dtype and dtype not in _DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if not shard_gb > 0:
        raise ConfigError(f"--shard-gb must be positive, got {shard_gb}")
    for pattern in ignore:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--ignore must be a regular expression, got {pattern!r}: {error}") from error
    return hf.SaveOptions(
        style=style,
        dtype=_DTYPES[dtype] if dtype else None,
        max_shard_bytes=max(int(shard_gb * 10**9), 1),
        drop=tuple(ignore),
    )


def _convert(source: Path, destination: Path, options: hf.SaveOptions, upcycle: str, config: str) -> Path:
    if not source.is_dir():
        raise ConfigError(f"expected a Hugging Face folder, a run or a checkpoint to convert, got {str(source)!r}")
    if upcycle and config:
        raise ConfigError("--upcycle writes a Hugging Face folder and --config a run: expected one of them, got both")
    if upcycle:
        return models.upcycle(source, destination, _upcycle_config(upcycle), options=options)
    if config:
        return _to_run(source, destination, load_run_config(Path(config)), options)
    found = _checkpoint_of(source)
    if found is not None:
        return _from_run(found, destination, options)
    return models.convert(source, destination, options=options, ignore=options.drop)


def _upcycle_config(text: str) -> models.UpcycleConfig:
    """granularity=2,expansion=4,top_k=2 -> the config; keys that are left out keep their defaults."""
    values: dict[str, object] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--upcycle must read key=value,key=value, got {text!r}")
        try:
            values[key.strip()] = float(value) if key.strip() == "router_std" else int(value)
        except ValueError as error:
            raise ConfigError(f"--upcycle {key.strip()} must be a number, got {value!r}") from error
    return from_mapping(models.UpcycleConfig, values, "--upcycle")


# ---- runs ----


def _checkpoint_of(source: Path) -> Path | None:
    """The checkpoint that `source` is or holds the newest of; None where it is no run."""
    if (source / _MANIFEST).is_file():
        return source
    folder = source / _CHECKPOINTS
    if not folder.is_dir():
        return None
    found = checkpoint.latest(folder)
    if found is None:
        raise CheckpointError(f"nothing to convert: {folder} holds no whole checkpoint")
    return found


def _from_run(found: Path, destination: Path, options: hf.SaveOptions) -> Path:
    run = found.parent.parent
    for name in (_MODEL_FILE, _RUN_FILE):
        if not (run / name).is_file():
            raise CheckpointError(f"expected {name} of the run beside its checkpoints, got no {run / name}")
    run_config = load_run_config(run / _RUN_FILE)
    hf_config = models.load_config(config_file=str(run / _MODEL_FILE))
    names = hf.names_of(models.describe(hf_config, balance_bias=run_config.router.bias_update_rate > 0))
    return hf.write(hf.RunCheckpoint(found, names), destination, names=names, options=options)


def _to_run(source: Path, destination: Path, config: Config, options: hf.SaveOptions) -> Path:
    """A run folder with a checkpoint of step 0: weights of `source`, optimizer state as before the first step."""
    if destination.exists() and any(destination.iterdir()):
        raise CheckpointError(f"{destination} exists already and is not empty: expected a new run folder")
    if not (source / models.CONFIG_FILE).is_file():
        raise ConfigError(f"expected a Hugging Face folder with a {models.CONFIG_FILE}, got {str(source)!r}")
    hf_config = models.load_config(config_file=str(source / models.CONFIG_FILE))
    if hasattr(hf_config, "quantization_config"):
        delattr(hf_config, "quantization_config")  # the weights are written as values
    destination.mkdir(parents=True, exist_ok=True)
    try:
        _write_run(source, destination, config, hf_config, options)
    except BaseException:
        shutil.rmtree(destination)
        raise
    return destination


def _write_run(source: Path, destination: Path, config: Config, hf_config: object, options: hf.SaveOptions) -> None:
    # One process: a checkpoint opens at any layout, and which tensors it has depends only on precision and FSDP2.
    alone = replace(config.parallel, expert=1, replicate=1)
    model_file = (destination / _MODEL_FILE).resolve()
    model = ModelConfig(config_file=str(model_file))
    if alone.data != "none":
        init_process_group(Launch(), device_type="cpu", timeout_seconds=alone.timeout_seconds)
    try:
        trainee = setup.build(replace(config, parallel=alone, model=model), hf_config, torch.device("cpu"))
        hf.load(trainee.model, source, ignore=options.drop)
        _begin(trainee, source, options.drop)
        facts = {"seed": config.run.seed, "global_batch_size": config.train.global_batch_size}
        checkpoint.save(destination / _CHECKPOINTS, 0, trainee.model, trainee.optimizer, facts)
    finally:
        shutdown()
    model_file.write_text(json.dumps(json.loads(hf_config.to_json_string()), indent=2) + "\n", encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    run = replace(config.run, dir=str(destination), resume="")
    saved = replace(config, run=run, model=model)
    (destination / _RUN_FILE).write_text(to_toml(saved), encoding="utf-8")


@torch.no_grad()
def _begin(trainee: setup.Trainee, source: Path, ignore: Sequence[str]) -> None:
    """The optimizer's state before its first step: zeros, and masters that hold the folder's own values."""
    optimizer = trainee.optimizer
    create_optimizer_state(optimizer)
    names = hf.names_of(trainee.model)
    with hf.Reader(source, names, ignore=ignore) as reader:
        for name, parameter in trainee.inner.named_parameters():
            state = optimizer.state[parameter]
            for key, value in state.items():
                if key != "master":
                    value.zero_()
            if "master" in state:
                tensor, expert = split_member(name)
                box = [(0, size) for size in names.shapes[tensor]]
                if expert is not None:
                    box[0] = (expert, expert + 1)
                master = state["master"]
                local = master.to_local() if isinstance(master, DTensor) else master
                local.copy_(reader.read(tensor, tuple(box)).view(local.shape))
    if isinstance(optimizer, MasterWeights):
        optimizer.write_back()
