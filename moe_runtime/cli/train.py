"""The train command: everything that can be wrong with a run is found here, before a process group exists.

The checks go from fast to slow: the file, the launch, the two together (well under a second each), then in
`moe_runtime.cli.job` the model's config and the data, which import torch and transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from moe_runtime.cli import lazy
from moe_runtime.cli.exits import FAILED, INTERRUPTED, USAGE, fail
from moe_runtime.comm.bootstrap import Launch, launch_from_env
from moe_runtime.core.env import environment
from moe_runtime.core.errors import CheckpointError, ConfigError, NumericsError, UnsupportedError
from moe_runtime.train.config import Config, check_environment, check_world, load
from moe_runtime.train.elastic import restarted


def train(config_file: str, overrides: Sequence[str], resume: str) -> int:
    """Check, train, report; see `run_job` for the exit code."""

    def prepare() -> Job:
        config, launch = plan(config_file, overrides, resume, environment())
        return lazy.load("job").prepare_job(config, launch)

    return run_job(prepare)


class Job(Protocol):
    """Something that nothing more can be known to be wrong with."""

    def run(self) -> None:
        """Do it."""
        ...


def run_job(prepare: Callable[[], Job]) -> int:
    """Run what `prepare` gives; 0, 2 for a config that cannot run, 1 for a run that failed with a reason.

    Other errors are defects and keep their traceback.
    """
    try:
        job = prepare()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        return fail(str(error), code=USAGE)
    except CheckpointError as error:
        return fail(str(error), code=FAILED)
    except ImportError as error:
        return fail(_missing_package(error), code=USAGE)
    try:
        job.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        return fail(str(error), code=USAGE, shared=False)
    except NumericsError as error:
        return fail(str(error), code=FAILED, final=True)
    except (CheckpointError, UnsupportedError) as error:
        return fail(str(error), code=FAILED, shared=False)
    return 0


def plan(config_file: str, overrides: Sequence[str], resume: str, env: Mapping[str, str]) -> tuple[Config, Launch]:
    """The config and this process's place, each valid and fitting the other; `resume` replaces run.resume if given."""
    config = load(Path(config_file), overrides)
    if resume:
        config = replace(config, run=replace(config.run, resume=resume))
    launch = launch_from_env(env)
    config = restarted(config, launch)
    check_world(config, launch.world_size)
    check_environment(config)
    return config, launch


def _missing_package(error: ImportError) -> str:
    """The sentence of an optional package's leaf module; an import that failed anywhere else is a defect."""
    if error.name is not None:
        raise error
    return str(error)
