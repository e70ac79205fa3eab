"""``python -m hpctrain``."""

from __future__ import annotations

from hpctrain.cli import main

if __name__ == "__main__":
    main(prog_name="hpctrain")
