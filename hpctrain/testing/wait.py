"""Wait for something that other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], *, timeout: float = 60.0, what: str = "") -> None:
    """Call ``condition`` again and again until it is true.

    Args:
        condition: a look at files, processes or answers.
        timeout: seconds to wait at most.
        what: what is waited for, for the error message.

    Raises:
        TimeoutError: it was not true within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what or condition}")
        time.sleep(0.05)
