"""A loss that goes wrong where a test wants it to: once a fault, on one rank, at one step.

``FAULTS`` holds ``step:rank:fault`` entries, for example ``7:1:raise,12:0:exit``; ``PACE`` the
seconds that every call takes at least; ``HOLD`` steps, ``7,14``, at which all ranks wait for a
file ``go-7`` in the run directory, with ``held-7`` to say so; ``SLEEPY`` a rank that takes 50 ms
longer than the others, ``NOISY`` one whose loss, and with it its gradient, is twenty times too
large.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from hpctrain.model.transformer import next_token_loss
from hpctrain.rundir import RunDir

_calls = [0]


def loss(model, batch, micro_batches=1):
    if _calls[0] % micro_batches == 0:
        time.sleep(float(os.environ.get("PACE", "0")))
    _calls[0] += 1
    for step in filter(None, os.environ.get("HOLD", "").split(",")):
        _hold(int(step))
    for entry in filter(None, os.environ.get("FAULTS", "").split(",")):
        step, rank, fault = entry.split(":")
        if int(rank) == dist.get_rank() and _first_time(int(step), entry):
            _go_wrong(fault, model)
    if os.environ.get("SLEEPY") == str(dist.get_rank()):
        time.sleep(0.05)
    found = next_token_loss(model(batch[0]), batch[1])
    return 20 * found if os.environ.get("NOISY") == str(dist.get_rank()) else found


def _at(step: int) -> bool:
    last = RunDir(Path(sys.argv[-1])).last_step()
    return step <= (0 if last is None else last.step)


def _hold(step: int) -> None:
    go = Path(sys.argv[-1]) / f"go-{step}"
    if go.exists() or not _at(step):
        return
    while not go.exists():
        go.with_name(f"held-{step}").touch()
        time.sleep(0.05)


def _first_time(step: int, entry: str) -> bool:
    """Whether the run is at ``step`` and this fault has not happened in it."""
    if not _at(step):
        return False
    try:
        (Path(sys.argv[-1]) / f"fault-{entry}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _go_wrong(fault: str, model) -> None:
    if fault == "raise":
        raise RuntimeError("node on fire")
    if fault == "typo":
        raise NameError("name 'lr' is not defined")
    if fault == "exit":
        sys.exit(3)
    if fault == "leave":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "sleep":
        sleep_for_ever()
    if fault == "signal":
        os.kill(os.getpid(), signal.SIGUSR2)
    if fault == "signals":  # and again while the checkpoint is being written
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Thread(target=_again, daemon=True).start()
    if fault == "skip":  # the gradients' all-reduce, which the other ranks wait in
        model.require_backward_grad_sync = False


def _again() -> None:
    for _ in range(60):
        time.sleep(0.03)
        os.kill(os.getpid(), signal.SIGTERM)


def sleep_for_ever() -> None:
    while True:
        time.sleep(1.0)
