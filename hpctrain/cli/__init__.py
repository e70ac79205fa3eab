"""The command line: ``hpctrain COMMAND``.

Each command is a module of this package with an object ``command``; it is imported when it
is invoked and not before, so that ``hpctrain --help`` costs no more than click does. The
short texts of that help therefore stand here, beside the names.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from hpctrain import __version__
from hpctrain.errors import Exit, HpctrainError, SpecError

COMMANDS = {
    "init": "Write a commented job file that works as it stands.",
    "plan": "Say whether a job fits, how fast it is, and what would be better.",
    "submit": "Start a run from a job file, here or on Slurm.",
    "status": "Show where a run stands, and why.",
    "top": "Show all runs that are alive, and how they do.",
    "history": "List all runs of a directory tree.",
    "logs": "Print what the ranks of a run wrote.",
    "cancel": "Stop a run.",
    "resume": "Go on with a run from its last checkpoint.",
    "sweep": "Run a job over values of its keys.",
    "report": "Summarise a run, or report the scaling of many.",
    "explain": "Explain a key of the job file.",
    "schema": "Print the JSON Schema of the job file.",
    "data": "Make token files and look into them.",
    "checkpoint": "Look at checkpoints, check, compare and convert them.",
    "topo": "Show ranks, their places and groups, and what links them.",
    "schedule": "Show, compare and check pipeline schedules.",
    "calibrate": "Measure this node for the planner.",
    "site": "List, show and check machines, or describe a new one.",
    "doctor": "Check what this machine has and what is missing.",
    "batch": "Begin and end a Slurm job (its batch script does this).",
    "run": "Run one rank (every rank executes this).",
}
"""Every command and its short help, in the order in which a person meets them."""

# Environment faults that a person can mend; any other OSError is a fault of ours.
_MENDABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EMFILE,
    errno.ENFILE,
}

INTERNAL = 1
"""Exit code of a fault of hpctrain itself."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"hpctrain.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, 1, 0.5)
            known = f"did you mean {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r}; {known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> NoReturn:
        """Run a command and leave the process; every error becomes a message and a code."""
        extra["standalone_mode"] = False
        try:
            code = super().main(args, *more, **extra)
            sys.stdout.flush()
        except Exception as error:
            code = _report(error)
        except KeyboardInterrupt:
            code = _interrupted()
        sys.exit(int(code) if isinstance(code, int) else Exit.OK)


def _report(error: Exception) -> int:
    """Say on stderr what went wrong, and give the exit code."""
    match error:
        case click.Abort():
            return _interrupted()
        case SpecError():
            count = len(error.problems)
            for problem in error.problems:
                click.echo(str(problem), err=True)
            say_error(f"{count} fault{'s' if count > 1 else ''} in the job; nothing was started")
            return Exit.USAGE
        case HpctrainError():
            say_error(error.message, error.hint)
            return error.exit_code
        case click.ClickException():
            context = getattr(error, "ctx", None)
            help_of = f"see: {context.command_path} --help" if context is not None else None
            say_error(error.format_message(), help_of)
            return Exit.USAGE
        case OSError(errno=errno.EPIPE):
            # The reader of our output has gone (`| head`): nothing is left to say, and the
            # interpreter must not try to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return INTERNAL
        case OSError() if error.errno in _MENDABLE and error.filename is not None:
            say_error(f"{os.fsdecode(error.filename)}: {error.strerror}")
            return Exit.USAGE
    import traceback

    traceback.print_exception(error)
    say_error(
        f"this is a fault of hpctrain {__version__}, not of yours",
        "please report it to the maintainers with all of the above, the command line and the "
        "output of `hpctrain doctor`",
    )
    return INTERNAL


def _interrupted() -> int:
    click.echo("hpctrain: interrupted", err=True)
    return INTERRUPTED


def say_error(message: str, hint: str | None = None) -> None:
    """One error on stderr, its hint below it."""
    click.echo(f"hpctrain: error: {message}", err=True)
    for line in (hint or "").splitlines():
        click.echo(f"  {line}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="hpctrain %(version)s")
def main() -> None:
    """Train transformers on Slurm and MPI machines from one YAML file.

    Start with `hpctrain init`, then `hpctrain submit job.yaml`.
    """
