"""The finetune command: what can be wrong with a configuration is found here, in well under a second.

The base, the data and the adapters are looked at in `moe_runtime.cli.finetune_job`, before memory is filled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moe_runtime.cli import lazy
from moe_runtime.cli.train import Job, run_job
from moe_runtime.comm.bootstrap import Launch, launch_from_env
from moe_runtime.core.env import environment
from moe_runtime.train.config import check_environment, check_world
from moe_runtime.train.elastic import restarted
from moe_runtime.train.finetune_config import BaseFiles, FinetuneConfig, as_training, find_base, load


def finetune(config_file: str, overrides: Sequence[str], resume: str) -> int:
    """Check, plan, train, report; the exit code is `run_job`'s."""

    def prepare() -> Job:
        config, launch, base = plan(config_file, overrides, resume, environment())
        return lazy.load("finetune_job").prepare_job(config, launch, base)

    return run_job(prepare)


def plan(
    config_file: str, overrides: Sequence[str], resume: str, env: Mapping[str, str]
) -> tuple[FinetuneConfig, Launch, BaseFiles]:
    """The config, this process's place and the base's files, each valid and fitting the others."""
    config = load(Path(config_file), overrides)
    if resume:
        config = replace(config, run=replace(config.run, resume=resume))
    launch = launch_from_env(env)
    base = find_base(config.base)
    training = restarted(as_training(config, base.config_file), launch)
    config = replace(config, run=training.run, train=training.train, parallel=training.parallel)
    check_world(training, launch.world_size)
    check_environment(training)
    return config, launch, base
