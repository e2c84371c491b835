"""The command line: `python -m moe_runtime {train,finetune,convert,doctor,cluster,bench}`.

Start-up is light: this module parses arguments and knows nothing of torch. What a command does is in the module of its
name, imported by `lazy.load` when the command runs, so that `--help` and a misspelt option answer at once.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

from moe_runtime.cli import lazy
from moe_runtime.cli.exits import INTERRUPTED, USAGE, fail
from moe_runtime.core.private import private_files

try:
    import typer
    from typer.core import TyperCommand
except ImportError as error:
    raise ImportError("the command line needs: pip install 'moe-runtime[train]'") from error

RESUME_OPTION, RESUME_LATEST = "--resume", "latest"

_PASSES_ARGUMENTS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

# typer brings its own copy of click in some versions: the base of its BadParameter is that copy's usage error.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0, 2 for a usage or config error, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = typer.main.get_command(_app())
    try:
        with private_files():
            return command.main(arguments, prog_name="moe_runtime", standalone_mode=False) or 0
    except UsageError as error:
        # The message of a usage error is what click would print under its usage line.
        return fail(cast(Any, error).format_message(), code=USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _app() -> "typer.Typer":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Train grouped mixtures of experts.")
    app.callback()(_root)
    app.command("train", cls=_TrainCommand)(train_command)
    app.command("finetune", cls=_TrainCommand)(finetune_command)
    app.command("convert")(convert_command)
    app.command("doctor")(doctor_command)
    app.command("bench", context_settings=_PASSES_ARGUMENTS_ON)(bench_command)
    app.command("cluster")(cluster_command)
    return app


class _TrainCommand(TyperCommand):
    """`--resume` alone means `--resume latest`; click has no option whose value may be left out in every version."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_resume_value(args))


def with_resume_value(args: Sequence[str]) -> list[str]:
    """`args` with 'latest' after each --resume that is followed by nothing, an option or a .toml file."""
    result: list[str] = []
    for position, argument in enumerate(args):
        result.append(argument)
        following = args[position + 1] if position + 1 < len(args) else "--"
        if argument == RESUME_OPTION and (following.startswith("-") or following.endswith(".toml")):
            result.append(RESUME_LATEST)
    return result


def _print_version(asked: bool) -> None:
    if asked:
        print(f"moe_runtime {lazy.package_version()}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train grouped mixtures of experts."""


def train_command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file; see launch/configs/quickstart.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one value of the file.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(metavar="[PATH|latest]", help="Go on from a run folder or a checkpoint; alone: the latest run."),
    ] = "",
) -> int:
    """Train the model that CONFIG describes. Under torchrun, srun or mpirun every rank runs this same command."""
    return lazy.load("train").train(config, overrides or [], resume)


def finetune_command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file; see launch/configs/finetune.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one value of the file.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(metavar="[PATH|latest]", help="Go on from a run folder or a checkpoint; alone: the latest run."),
    ] = "",
) -> int:
    """Train adapters on a frozen base, by CONFIG. Under a launcher every rank runs this same command."""
    return lazy.load("finetune").finetune(config, overrides or [], resume)


def convert_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A Hugging Face folder, a run's folder, or one of its checkpoints.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A new folder.")],
    style: Annotated[
        str,
        typer.Option(metavar="STYLE", help="Names of experts: per_expert (any transformers) or fused (5 and later)."),
    ] = "per_expert",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16; as they are.")] = "",
    shard_gb: Annotated[float, typer.Option(metavar="GB", help="Largest size of a file.")] = 5.0,
    upcycle: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Make a mixture of experts of a dense model: granularity, expansion, top_k, router_std, seed.",
        ),
    ] = "",
    config: Annotated[
        str, typer.Option(metavar="FILE", help="Make DST a run of this TOML file with SRC's weights at step 0.")
    ] = "",
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX", help="Tensors that may be left out because the other side has no place for them."
        ),
    ] = None,
) -> int:
    """Convert between Hugging Face folders and checkpoints of runs; prints the folder that was written."""
    return lazy.load("convert").convert(
        source,
        destination,
        style=style,
        dtype=dtype,
        shard_gb=shard_gb,
        upcycle=upcycle,
        config=config,
        ignore=ignore or [],
    )


def bench_command(context: typer.Context) -> int:
    """Run a benchmark: `bench NAME [ARGUMENTS OF ITS OWN]`. `bench` alone lists the names."""
    name, *arguments = context.args or ["--help"]
    if name == "--help":
        print(f"bench NAME [ARGUMENTS], NAME one of {', '.join(lazy.BENCHMARKS)}; bench NAME --help explains one")
        return 0
    if name not in lazy.BENCHMARKS:
        raise typer.BadParameter(f"expected a benchmark among {', '.join(lazy.BENCHMARKS)}; got {name!r}")
    lazy.run_benchmark(name, arguments)
    return 0


def doctor_command() -> int:
    """Print versions, devices, and which backend each kernel would use and why not a faster one."""
    return lazy.load("doctor").doctor()


def cluster_command(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="A command of moe_runtime.")],
    hosts: Annotated[int, typer.Option(metavar="N", help="Hosts, each a network namespace.")] = 2,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes on each host.")] = 2,
    launcher: Annotated[str, typer.Option(metavar="NAME", help="torchrun, mpirun, or slurm (a dry run).")] = "torchrun",
    max_restarts: Annotated[int, typer.Option(metavar="N", help="Restarts after a failure, by torchrun.")] = 0,
) -> int:
    """Run a command on several hosts made of this one, with addresses, names and launchers of their own. Needs root."""
    return lazy.load("cluster").cluster(words, hosts=hosts, ranks=ranks, launcher=launcher, max_restarts=max_restarts)
