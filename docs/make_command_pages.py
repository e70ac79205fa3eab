"""Write docs/commands/*.md: a page a command, its help and examples with real output.

Runs every command for real, on this machine and on a local Slurm cluster of its own, which
takes about two minutes:

    python docs/make_command_pages.py

In the output the working directory is shown as /home/you/project and this host as workstation;
everything else stands as it was printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.cli import COMMANDS
from hpctrain.rundir import RunDir
from hpctrain.testing.slurm import SlurmCluster

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
PAGES = Path(__file__).parent / "commands"
HOME = "/home/you/project"

LOOK = {
    "init": "The comments of the file are the descriptions of its keys, which are also in "
    "[the job file](../job-file.md).",
    "submit": "A run is a directory below `runs/`; see [exit codes](../exit-codes.md) for what "
    "the command ends with.",
    "status": "All that it says is in the run directory and, while Slurm knows the job, in "
    "Slurm; no accounting database is needed.",
    "top": "It reads the run directories and asks Slurm about the jobs that may be alive.",
    "history": "What it costs to be restarted stands in `restarts.jsonl` of each run: "
    "[how a run goes on](../slurm.md#how-a-job-ends-and-how-the-run-goes-on).",
    "site": "What the files hold: [machines](../machines.md); what is rendered from them: "
    "[a page a machine](../sites/README.md).",
    "batch": "Not for people: the batch script calls it, and how it decides is told in "
    "[Running on Slurm](../slurm.md#how-a-job-ends-and-how-the-run-goes-on).",
    "logs": "Each rank writes a file of its own, `logs/rank00000.log` and so on; what comes "
    "before MPI has told a rank its number is in `logs/job.log`.",
    "cancel": "The ranks look for the stop file once a second and agree on it at the end of a "
    "step.",
    "resume": "A resumed run goes on in its own directory as a new attempt, bit for bit where "
    "the ranks are the same.",
    "sweep": "The keys of a sweep file, and a study from beginning to end: [scaling]"
    "(../scaling.md).",
    "report": "Every number is worked out from `metrics.jsonl` and `events.jsonl` in the run "
    "directories. What each means: [scaling](../scaling.md).",
    "explain": "The same texts as in [the job file](../job-file.md).",
    "schema": "Editors with a YAML language server complete and check job files by it.",
    "data": "More about token files: [data](../data.md).",
    "checkpoint": "The format: [checkpoint format](../checkpoint-format.md); levels, recovery "
    "and tuning: [checkpoints](../checkpoints.md).",
    "topo": "What the columns mean, and the groups behind them: [communicators]"
    "(../communicators.md) and [placement](../placement.md).",
    "schedule": "Pipeline schedules are tables of actions; these commands make and examine them.",
    "doctor": "It loads MPI and HDF5 in processes of their own, so that a broken library is a "
    "line of the table and not a crash.",
    "run": "Not for people: it needs to be started by MPI, once a rank, with the same directory.",
}


@dataclass
class Book:
    """Examples by command, in the order in which they were run."""

    directory: Path
    environment: Mapping[str, str]
    examples: dict[str, list[str]] = field(default_factory=dict)

    def show(self, page: str, words: str, command: str, *, code: int = 0, last: int = 0) -> str:
        """Run ``hpctrain ...`` and put it with its output on a page.

        Args:
            page: the command whose page it belongs to.
            words: what the example shows.
            command: as a person would type it.
            code: the exit code that is right.
            last: keep only so many lines of the output; 0 keeps all.
        """
        done = subprocess.run(
            [HPCTRAIN, *shlex.split(command)[1:]],
            cwd=self.directory, env=dict(self.environment), text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300,
        )  # fmt: skip
        if done.returncode != code:
            raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}")
        output = done.stdout.rstrip("\n")
        if last:
            lines = output.splitlines()
            output = "\n".join(["...", *lines[-last:]] if len(lines) > last else lines)
        shown = self._shown(output)
        ends = f"\n$ echo $?\n{code}" if code else ""
        block = f"{words}\n\n```console\n$ {command}\n{shown}{ends}\n```\n"
        self.examples.setdefault(page, []).append(block)
        return done.stdout

    def quietly(self, command: str) -> str:
        return subprocess.run(
            [HPCTRAIN, *shlex.split(command)[1:]], cwd=self.directory,
            env=dict(self.environment), text=True, check=True, capture_output=True, timeout=300,
        ).stdout  # fmt: skip

    def _shown(self, text: str) -> str:
        text = text.replace(str(self.directory), HOME).replace(sys.prefix, "/home/you/.venv")
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "workstation", text)

    @property
    def newest(self) -> RunDir:
        return RunDir.all(self.directory / "runs")[-1]


def until(what: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain")
        time.sleep(0.2)


def on_this_machine(book: Book) -> None:
    book.show("init", "A job for this machine:", "hpctrain init")
    text = (book.directory / "job.yaml").read_text().rstrip("\n")
    book.examples["init"].append(f"What was written:\n\n```yaml\n{text}\n```\n")
    book.show("init", "A job for a cluster that is known by name:",
              "hpctrain init --machine frontier frontier.yaml")  # fmt: skip
    book.show("init", "A file that exists is never overwritten:", "hpctrain init", code=2)

    topics = "import pydoc_data.topics as t; print('\\n'.join(t.topics.values()))"
    with (book.directory / "english.txt").open("w") as stream:
        subprocess.run([sys.executable, "-c", topics], stdout=stream, check=True)
    book.show("data", "Text to a token file, a token a byte:",
              "hpctrain data tokenize english.txt -o tokens.h5")  # fmt: skip
    book.show("data", "What a token file holds:", "hpctrain data inspect tokens.h5")

    book.show("explain", "What a key means, and where its value came from:",
              "hpctrain explain train.lr job.yaml --set train.lr=2e-3")  # fmt: skip
    book.show("explain", "A value that was worked out:",
              "hpctrain explain train.micro_batch job.yaml")  # fmt: skip
    book.show("explain", "The keys of a section:", "hpctrain explain train.schedule")
    book.show("explain", "A key that does not exist:", "hpctrain explain learning_rate", code=2)
    book.show("explain", "A line of the batch script:",
              "hpctrain explain NCCL_NET frontier.yaml --set nodes=2")  # fmt: skip
    book.show("schema", "All keys for people; the JSON Schema without the option:",
              "hpctrain schema --markdown", last=6)  # fmt: skip

    book.show("submit", "What Slurm would get, without touching anything:",
              "hpctrain submit job.yaml --dry-run", last=24)  # fmt: skip
    (book.directory / "broken.yaml").write_text(
        (book.directory / "job.yaml").read_text().replace("hidden: 192", "hiden: 192")
        .replace("lr: 1e-3", "lr: fast").replace("0-01:00:00", "1:30")
    )  # fmt: skip
    book.show("submit", "All faults of a file at once, each with its line and column:",
              "hpctrain submit broken.yaml", code=2)  # fmt: skip
    book.show("submit", "A job that cannot be:",
              "hpctrain submit job.yaml --set train.global_batch=15", code=3)  # fmt: skip
    small = "--set model.hidden=96 --set train.steps=60 --set checkpoint.every=20"
    book.show("submit", "A run on this machine, with two MPI ranks:",
              f"hpctrain submit job.yaml {small}")  # fmt: skip
    run = book.newest.id
    book.show("status", "A finished run; without RUN the newest one is meant:", "hpctrain status")
    book.show("logs", "The last lines of the launcher's and of rank 0's log:", "hpctrain logs -n 3")
    book.show("report", "The table of a run:", f"hpctrain report {run}")
    book.show("resume", "A finished run goes on for longer:",
              f"hpctrain resume {run} --set train.steps=90")  # fmt: skip
    book.show("report", "A run of two attempts:", "hpctrain report", last=4)
    book.show("resume", "What a checkpoint is bound to cannot change:",
              f"hpctrain resume {run} --set model.layers=6", code=2)  # fmt: skip

    on_checkpoints(book, run)
    on_sweeps(book)

    book.show("submit", "A run that is left to itself:",
              "hpctrain submit job.yaml --no-wait --set train.steps=5000")  # fmt: skip
    until(lambda: (last := book.newest.last_step()) is not None and last.step >= 60)
    run = book.newest.id
    book.show("status", "A running one:", "hpctrain status")
    book.show("cancel", "Ask a run to checkpoint and stop:", f"hpctrain cancel {run}")
    until(lambda: json.loads(book.quietly("hpctrain status --json"))["status"] == "stopped")
    book.show("status", "For programs:", "hpctrain status --json")
    newest = max(book.newest.checkpoints.glob("step*")) / "tensors.h5"
    newest.write_bytes(newest.read_bytes()[:-100])
    steps = int(newest.parent.name.removeprefix("step"))
    book.show("resume", "A damaged checkpoint is passed over, and it says why:",
              f"hpctrain resume {run} --set train.steps={steps}")  # fmt: skip
    book.show("submit", "A run whose ranks find a fault:",
              "hpctrain submit job.yaml --set train.global_batch=1e6", code=3)  # fmt: skip
    book.show("logs", "The log of one rank:", "hpctrain logs --rank 1")
    book.show("cancel", "A run that is over:", f"hpctrain cancel {run}")
    book.show("run", "By hand, and without a run directory:", "hpctrain run .", code=2)
    book.show("doctor", "A workstation without GPU and Slurm:", "hpctrain doctor")

    on_sites(book)
    book.show("history", "What became of all runs:", "hpctrain history")
    book.show("top", "Nothing is alive:", "hpctrain top")
    book.show("top", "All runs:", "hpctrain top --all --once")
    book.show(
        "batch", "Outside of a job there is nothing to begin:", "hpctrain batch begin", code=2
    )
    book.show("topo", "A job's ranks with what really links them:",
              "hpctrain topo job.yaml --set ranks_per_node=4 --measure")  # fmt: skip
    book.show("topo", "All devices of two nodes of a site, from its description:",
              "hpctrain topo --machine frontier --nodes 2")  # fmt: skip
    book.show("topo", "Measuring needs the nodes:",
              "hpctrain topo --machine frontier --measure", code=3)  # fmt: skip
    book.show("schedule", "One schedule, drawn:",
              "hpctrain schedule show --schedule 1f1b -p 4 -m 8")  # fmt: skip


def on_sites(book: Book) -> None:
    """Machines that come with hpctrain, and one that does not."""
    book.show("site", "What there is:", "hpctrain site list")
    book.show("site", "What is not certain about one:", "hpctrain site show frontier --low")
    book.show("site", "This node as a site file:", "hpctrain site probe ours")
    book.show("site", "What is left open in it:", "hpctrain site check ours.yaml")
    (book.directory / "wrong.yaml").write_text("base: dgx-h100\nname: wrong\nnode: {devices: 9}\n")
    book.show("site", "A file with a fault:", "hpctrain site check wrong.yaml", code=2)


def on_sweeps(book: Book) -> None:
    """A strong sweep of the job of the other examples; its token file is there."""
    (book.directory / "sweep.yaml").write_text(
        "name: strong\njob: job.yaml\nkind: strong\naxes: {ranks_per_node: [1, 2, 3]}\n"
        "set: {model.hidden: 96, train.steps: 30}\nrepeats: 2\n"
    )
    text = (book.directory / "sweep.yaml").read_text().rstrip("\n")
    book.examples["sweep"] = [f"A sweep file:\n\n```yaml\n{text}\n```\n"]
    book.show("sweep", "What it would do:", "hpctrain sweep sweep.yaml --dry-run")
    book.show("sweep", "Its points one after another on this machine:", "hpctrain sweep sweep.yaml")
    book.show("sweep", "Where it stands:", "hpctrain sweep status")
    book.show("sweep", "What is missing of it:", "hpctrain sweep resume strong")
    (book.directory / "bad.yaml").write_text(
        "job: job.yaml\nkind: strng\naxes: {ranks_per_node: 4}\nrepeat: 3\n"
    )
    book.show("sweep", "All faults of a file at once:", "hpctrain sweep bad.yaml", code=2)
    book.show("report", "The scaling of a sweep, and the same as a page, a table and data:",
              "hpctrain report strong -o report.html -o report.csv")  # fmt: skip
    book.show("report", "Two versions of a code, two machines or layouts, with a gate for CI:",
              "hpctrain report --compare strong strong --fail-below 0.95")  # fmt: skip


def on_checkpoints(book: Book, run: str) -> None:
    """The checkpoints of a finished run of two ranks."""
    book.show("checkpoint", "What there is:", f"hpctrain checkpoint ls {run}")
    book.show("checkpoint", "What one holds:",
              f"hpctrain checkpoint inspect {run} --tensors 'model/layers.0.*'")  # fmt: skip
    book.show("checkpoint", "Every byte against its checksum:",
              f"hpctrain checkpoint verify {run} --deep --all")  # fmt: skip
    book.show("checkpoint", "What another layout would read:",
              f"hpctrain checkpoint reshard {run} --job job.yaml --set model.hidden=96 "
              "--set ranks_per_node=4 --set parallel.sharding=zero3 --dry-run")  # fmt: skip
    book.show("checkpoint", "Weights and optimizer for other programs:",
              f"hpctrain checkpoint export {run} all --format safetensors")  # fmt: skip
    book.show("checkpoint", "And back; nothing is lost on the way:",
              "hpctrain checkpoint import all checkpoints", last=4)  # fmt: skip
    book.show("checkpoint", "Whether two are the same:",
              f"hpctrain checkpoint diff checkpoints {run}")  # fmt: skip
    book.show("checkpoint", "How to write to a directory:",
              "hpctrain checkpoint tune . --size 64MiB --repeat 1")  # fmt: skip
    file = book.directory / "checkpoints" / "step00000090" / "tensors.h5"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    book.show("checkpoint", "One flipped bit:",
              "hpctrain checkpoint verify checkpoints --deep", code=5)  # fmt: skip
    book.show(
        "checkpoint", "Keep the newest good ones:", f"hpctrain checkpoint prune {run} --keep 1"
    )


def on_slurm(book: Book) -> None:
    """The same commands where Slurm answers."""
    sets = "--set nodes=2 --set ranks_per_node=1 --set slurm.cpus_per_task=1"
    book.show("submit", "On a cluster, where `auto` is Slurm:",
              f"hpctrain submit job.yaml {sets} --set train.steps=5000")  # fmt: skip
    run = book.newest
    until(lambda: (last := run.last_step()) is not None and last.step >= 20)
    book.show("status", "A job of Slurm's:", "hpctrain status")
    book.quietly(f"hpctrain cancel {run.id} --now")
    book.quietly(f"hpctrain submit job.yaml {sets} --set slurm.sbatch_options=[--begin=now+1hour]")
    book.show("status", "One that waits, and why:", "hpctrain status")
    book.show("cancel", "A job that waits is taken out of the queue:",
              f"hpctrain cancel {book.newest.id}")  # fmt: skip
    book.show("submit", "A request that would wait for ever is refused:",
              f"hpctrain submit job.yaml {sets} --set slurm.partition=short", code=3)  # fmt: skip
    book.show("doctor", "A login node:", "hpctrain doctor", last=13)


def help_of(name: str) -> str:
    done = subprocess.run(
        [HPCTRAIN, name, "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    return done.stdout.rstrip("\n")


def page(name: str, examples: list[str]) -> str:
    return "\n".join(
        [
            f"# hpctrain {name}",
            "",
            COMMANDS[name],
            "",
            f"```console\n$ hpctrain {name} --help\n{help_of(name)}\n```",
            "",
            LOOK[name],
            "",
            "## Examples",
            "",
            *examples,
        ]
    )


def index() -> str:
    rows = [f"| [`hpctrain {name}`]({name}.md) | {text} |" for name, text in COMMANDS.items()]
    return "\n".join([_INDEX, "| command | |", "|---|---|", *rows, "", _COMMON])


_INDEX = """\
# Commands

A page a command, with real output (written by `docs/make_command_pages.py`).
"""
_COMMON = """\
## What they have in common

- **Which run**: a path, an id, or the unique start of an id; `status`, `logs` and `report` take
  the newest run where none is given. Runs lie in `runs/` below the present directory, or where
  `--runs DIR` says.
- **For programs**: commands that read have `--json`: one object on stdout with a
  `schema_version`; all messages go to stderr. [Exit codes](../exit-codes.md) are fixed.
- **Terminals**: colour and progress bars appear on terminals only; `NO_COLOR` is honoured.

## Shell completion

Commands, options, job files and the ids of runs complete. For bash, add to `~/.bashrc`:

```bash
eval "$(_HPCTRAIN_COMPLETE=bash_source hpctrain)"
```

for zsh, to `~/.zshrc`:

```zsh
eval "$(_HPCTRAIN_COMPLETE=zsh_source hpctrain)"
```

and for fish, to `~/.config/fish/completions/hpctrain.fish`:

```fish
_HPCTRAIN_COMPLETE=fish_source hpctrain | source
```
"""


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        directory = Path(folder).resolve()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        # This machine's own Slurm, should it have one, is not what the examples are about.
        environment["PATH"] = str(Path(HPCTRAIN).parent)
        book = Book(directory, environment)
        on_this_machine(book)
        with SlurmCluster(nodes=2, cpus=4, env={"OMP_NUM_THREADS": "1"}) as cluster:
            book.environment = cluster.env
            on_slurm(book)
    PAGES.mkdir(exist_ok=True)
    # Pages of commands that need more than this machine (sites, sweeps, plans of large models)
    # are written by hand.
    for name in COMMANDS.keys() & book.examples.keys():
        (PAGES / f"{name}.md").write_text(page(name, book.examples[name]))
    (PAGES / "README.md").write_text(index())


if __name__ == "__main__":
    main()
