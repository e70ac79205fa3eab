"""A small model whose making slows one node down: its rank runs for a thirtieth of the time."""

import os
import subprocess
import sys

from torch import nn

_BRAKE = """
import os, signal, sys, time
rank = int(sys.argv[1])
for _ in range(int(float(sys.argv[2]) / 0.06)):
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.058)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.002)
"""


def build() -> nn.Module:
    if os.environ.get("SLURMD_NODENAME") == os.environ["SLOW_NODE"]:
        subprocess.Popen([sys.executable, "-S", "-c", _BRAKE, str(os.getpid()), "20"])
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
