"""How long the command line takes to start, against the least it could take.

``hpctrain --help`` is compared with ``python -c "import click"``, the same interpreter; the two
take turns, so that a busy machine slows both. ``submit --dry-run`` is timed by itself.

    python benchmarks/cli_startup.py [--rounds N] [--json]

Goals: help within 2 times, dry run within 0.5 s, and none of torch, mpi4py, h5py and numpy
loaded by either; exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAVY = ("torch", "mpi4py", "h5py", "numpy")
HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
HELP_GOAL, DRY_RUN_GOAL = 2.0, 0.5


def seconds(tokens: list[str], directory: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(tokens, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def loaded(arguments: list[str], directory: Path) -> list[str]:
    """Which of HEAVY are in sys.modules after a command."""
    script = (
        "import sys, json\n"
        f"sys.argv = ['hpctrain', *{arguments!r}]\n"
        "from hpctrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert not error.code\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, check=True, capture_output=True, text=True
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int) -> dict[str, object]:
    dry_run = ["submit", "job.yaml", "--dry-run"]
    commands = {
        "import_click": [sys.executable, "-c", "import click"],
        "help": [HPCTRAIN, "--help"],
        "dry_run": [HPCTRAIN, *dry_run],
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        subprocess.run([HPCTRAIN, "init"], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for round_number in range(rounds + 1):
            for name, tokens in commands.items():
                taken = seconds(tokens, directory)
                if round_number:  # the first round fills the page cache
                    times[name].append(taken)
        heavy = sorted({*loaded(["--help"], directory), *loaded(dry_run, directory)})
    medians = {name: statistics.median(found) for name, found in times.items()}
    # Of neighbours in time, so that a slow phase of the machine counts on both sides.
    pairs = zip(times["help"], times["import_click"], strict=True)
    ratio = statistics.median(helped / click for helped, click in pairs)
    return {
        "python": platform.python_version(),
        "rounds": rounds,
        "import_click_seconds": medians["import_click"],
        "help_seconds": medians["help"],
        "help_over_import_click": ratio,
        "dry_run_seconds": medians["dry_run"],
        "heavy_modules": heavy,
        "goals_met": ratio <= HELP_GOAL and medians["dry_run"] <= DRY_RUN_GOAL and not heavy,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"python -c 'import click'   {found['import_click_seconds']:.3f} s")
        print(
            f"hpctrain --help            {found['help_seconds']:.3f} s, "
            f"{found['help_over_import_click']:.2f} times (goal {HELP_GOAL:g})"
        )
        print(
            f"hpctrain submit --dry-run  {found['dry_run_seconds']:.3f} s (goal {DRY_RUN_GOAL:g})"
        )
        print(f"heavy modules loaded       {', '.join(found['heavy_modules']) or 'none'}")
    return 0 if found["goals_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
