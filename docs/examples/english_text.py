"""Write about 0.7 MB of English text that every Python carries: its language reference.

python docs/examples/english_text.py english.txt
hpctrain data tokenize english.txt -o english.h5
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} OUTPUT")
    text = "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"
    Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
