"""Restarts: a launch finds its own run again, and a plan for another number of ranks than it began with.

torchrun starts all ranks anew, with the same command, when one fails or a host comes or goes. Its run id tells such a
restart from another run of the same configuration, so it should be unlike that of any other launch; "none", what
torchrun takes without --rdzv-id, tells nothing.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moe_runtime.comm.bootstrap import Launch
from moe_runtime.core.errors import ConfigError
from moe_runtime.core.log import get_logger
from moe_runtime.train.config import Config, claim_run_dir, run_folders

LAUNCH_FILE = "launch.json"

_LOGGER = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """What a run's folder keeps of the launch that made or resumed it."""

    job: str
    world_size: int
    resume: str = ""


def restarted(config: Config, launch: Launch) -> Config:
    """`config` going on with this launch's run, for the number of ranks there is now; unchanged by a first start."""
    if not launch.job:
        if launch.restart_count and not config.run.resume:
            raise ConfigError(
                f"restart {launch.restart_count} cannot know its run: expected torchrun with an --rdzv-id of its own, "
                "got none; go on by hand with --resume"
            )
        return config
    found = [(folder, record) for folder in run_folders(config) if (record := read(folder)) is not None]
    own = [(folder, record) for folder, record in found if record.job == launch.job]
    if not own:
        return config
    folder, record = own[-1]
    config = replace(config, run=replace(config.run, dir=str(folder), resume=str(folder)))
    again = replanned(config, before=record.world_size, now=launch.world_size)
    if launch.is_main and again != config:
        _LOGGER.warning(
            "restarted with %d ranks, began with %d: %s", launch.world_size, record.world_size, changes(config, again)
        )
    return again


def replanned(config: Config, *, before: int, now: int) -> Config:
    """`config`, made for `before` ranks, for `now` of them.

    The batch stays what it is. Degrees become their largest divisors that fit, and there are more microbatches where
    one would hold more sequences a rank than before. What still does not fit, `check_world` refuses.
    """
    if before == now:
        return config
    parallel, train = config.parallel, config.train
    replicate = _largest_divisor(parallel.replicate, of=now)
    expert = _largest_divisor(parallel.expert, of=now // replicate)
    most = train.global_batch_size // (train.microbatches * before)
    fits = [
        count
        for count in range(train.microbatches, train.global_batch_size + 1)
        if train.global_batch_size % (count * now) == 0 and train.global_batch_size // (count * now) <= most
    ]
    microbatches = fits[0] if fits else train.microbatches
    return replace(
        config,
        parallel=replace(parallel, replicate=replicate, expert=expert),
        train=replace(train, microbatches=microbatches),
    )


def _largest_divisor(degree: int, *, of: int) -> int:
    return next(candidate for candidate in range(degree, 0, -1) if degree % candidate == 0 and of % candidate == 0)


def changes(before: Config, after: Config) -> str:
    """What a restart planned anew, in words; empty if nothing."""
    pairs = {
        "parallel.replicate": (before.parallel.replicate, after.parallel.replicate),
        "parallel.expert": (before.parallel.expert, after.parallel.expert),
        "train.microbatches": (before.train.microbatches, after.train.microbatches),
    }
    return ", ".join(f"{key} = {new} in place of {old}" for key, (old, new) in pairs.items() if old != new)


def claim(config: Config, launch: Launch) -> Path:
    """The run's folder, created and marked as this launch's; call it on one rank only."""
    folder = claim_run_dir(config)
    if launch.job and ((record := read(folder)) is None or record.job != launch.job):
        record = LaunchRecord(job=launch.job, world_size=launch.world_size, resume=config.run.resume)
        partial = folder / f"{LAUNCH_FILE}.partial"
        partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
        partial.replace(folder / LAUNCH_FILE)
    return folder


def resume_from(config: Config, folder: Path, launch: Launch) -> str:
    """run.resume, or what the launch began with where it is a restart and nothing was saved; call it on one rank."""
    record = read(folder)
    if record is None or record.job != launch.job or config.run.resume != str(folder):
        return config.run.resume
    if not any((folder / "checkpoints").glob("*/manifest.json")):
        return record.resume
    return config.run.resume


def read(folder: Path) -> LaunchRecord | None:
    """The record of a run's folder, None without one."""
    path = folder / LAUNCH_FILE
    return LaunchRecord(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
