"""The cluster command: several hosts on this one machine, and the launchers that real hosts have.

Output comes line by line with the host's name before it. For Slurm there is nothing to allocate: its batch script runs
with an `srun` that prints, and what it would run is checked.
"""

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moe_runtime.cli.exits import FAILED, INTERRUPTED, USAGE, fail
from moe_runtime.core.env import environment
from moe_runtime.core.errors import ConfigError, UnsupportedError
from moe_runtime.testing.launchers import Torchrun, start_mpiexec, start_torchrun
from moe_runtime.testing.netns import Cluster, make_cluster, running

LAUNCHERS = ("torchrun", "mpirun", "slurm")
_MODULE = ("-m", "moe_runtime")
_SLURM_SCRIPT = Path("launch/slurm.sbatch")
# What stands in for Slurm: srun prints its words one a line, scontrol splits a list of plain host names.
_STUBS = {
    "srun": "#!/bin/sh\nprintf '%s\\n' \"$@\"\n",
    "scontrol": "#!/bin/sh\nprintf '%s\\n' \"$3\" | tr , '\\n'\n",
}
_DRY_RUN_SECONDS = 60.0
_END_SECONDS = 60.0


def cluster(words: Sequence[str], *, hosts: int, ranks: int, launcher: str, max_restarts: int) -> int:
    """Run `moe_runtime WORDS` with `ranks` processes on each of `hosts` hosts; the first exit code that is not 0."""
    try:
        if not words:
            raise ConfigError("expected a command of moe_runtime after --, got nothing; example: -- train CONFIG")
        if launcher not in LAUNCHERS:
            raise ConfigError(f"--launcher must be one of {', '.join(LAUNCHERS)}, got '{launcher}'")
        if ranks < 1:
            raise ConfigError(f"--ranks must be at least 1, got {ranks}")
        if launcher == "slurm":
            return _slurm_dry_run(words, hosts, ranks)
        with _terminable(), running(make_cluster(hosts)) as made:
            if launcher == "mpirun":
                return _mpirun(made, words, ranks)
            torchrun = Torchrun(ranks=ranks, nodes=str(hosts), job=made.name, max_restarts=max_restarts)
            return _torchrun(made, words, torchrun)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:
        return fail(str(error), code=USAGE)
    except UnsupportedError as error:
        return fail(str(error), code=FAILED)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: hosts are removed."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _torchrun(made: Cluster, words: Sequence[str], torchrun: Torchrun) -> int:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    launched = [start_torchrun(made, host, torchrun, [*_MODULE, *words], **pipes) for host in made.hosts]
    printers = [_print_lines(process, host.name) for process, host in zip(launched, made.hosts, strict=True)]
    codes = [process.wait() for process in launched]
    for printer in printers:
        printer.join()
    return _said(made, codes)


def _mpirun(made: Cluster, words: Sequence[str], ranks: int) -> int:
    launcher, proxies = start_mpiexec(made, ranks, [sys.executable, *_MODULE, *words])
    printer = _print_lines(launcher, "mpirun")
    code = launcher.wait()
    printer.join()
    return code or _said(made, [proxy.wait(timeout=_END_SECONDS) for proxy in proxies])


def _print_lines(process: "subprocess.Popen[str]", name: str) -> threading.Thread:
    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"[{name}] {line}", end="", flush=True)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _said(made: Cluster, codes: Sequence[int]) -> int:
    failed = {host.name: code for host, code in zip(made.hosts, codes, strict=True) if code}
    if failed:
        launchers = ", ".join(f"{name} with code {code}" for name, code in failed.items())
        return fail(f"launchers failed: {launchers}", code=FAILED)
    return 0


def _slurm_dry_run(words: Sequence[str], hosts: int, ranks: int) -> int:
    """Run the batch script as Slurm's first host would, print what srun is given, and check that it is our command."""
    if not _SLURM_SCRIPT.is_file():
        raise ConfigError(f"expected {_SLURM_SCRIPT} below the working directory, which is the repository's root")
    if words[0] != "train":
        raise ConfigError(f"{_SLURM_SCRIPT} runs the train command, got '{words[0]}'")
    with tempfile.TemporaryDirectory() as folder:
        for name, script in _STUBS.items():
            (Path(folder) / name).write_text(script)
            (Path(folder) / name).chmod(0o700)
        names = ",".join(f"host{index}" for index in range(hosts))
        given = {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": names,
            "SLURM_NNODES": str(hosts),
            "SLURM_JOB_NUM_NODES": str(hosts),
            "NPROC": str(ranks),
        }
        done = subprocess.run(
            ["bash", "-c", 'PATH="$0:$PATH" exec bash "$@"', folder, str(_SLURM_SCRIPT), *words[1:]],
            env={**environment(), **given},
            capture_output=True,
            text=True,
            timeout=_DRY_RUN_SECONDS,
            check=False,
        )
    if done.returncode:
        return fail(f"{_SLURM_SCRIPT} ended with code {done.returncode}: {done.stderr.strip()}", code=FAILED)
    printed = done.stdout.splitlines()
    print("srun", *printed)
    expected = ["-m", "moe_runtime", *words]
    if not any(printed[start : start + len(expected)] == expected for start in range(len(printed))):
        return fail(f"expected srun to run '{' '.join(expected)}', got '{' '.join(printed)}'", code=FAILED)
    return 0
