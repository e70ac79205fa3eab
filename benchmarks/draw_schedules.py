"""Pictures and tables of docs/schedules.md, from the simulator.

python benchmarks/draw_schedules.py            write them
python benchmarks/draw_schedules.py --check    say whether they are up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import METHODS, Costs, Timeline, draw_svg, make, simulate

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "schedules.md"
PICTURES = DOCS / "images" / "schedules"

PICTURED = {
    **{name: {} for name in METHODS if name not in ("layered", "auto")},
    "layered": {"ranks": 1, "chunks": 4, "micro_batches": 4},
    "auto": {"limit": 3},
    "1f1b+2bp": {},
    "1f1b+vocab": {},
    "gpipe+offload": {},
    "bfs+fsdp": {},
}
BIG = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "hanayo", "bitpipe", "zeropp")


def run(name: str, **options) -> Timeline:
    shape = {"ranks": 4, "micro_batches": 8, **options}
    costs = Costs(gather=1.0, scatter=1.0, offload=1.0, reload=1.0)
    return simulate(make(name, transfers=False, **shape), costs)


def comparison(ranks: int, micro_batches: int) -> list[str]:
    """All methods on one model, F = I = W = 1 for one p-th of it."""
    lines = [
        f"p = {ranks}, m = {micro_batches}: ideal time {3 * micro_batches}",
        "",
        "| method | v | makespan | bubble | between steps | peak activations | to 1F1B |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in [n for n in METHODS if n != "auto"] + ["gpipe+2bp", "1f1b+2bp"]:
        try:
            timeline = run(name, ranks=ranks, micro_batches=micro_batches)
        except ImpossibleError as error:
            lines.append(f"| {name} | | {error.message} | | | | |")
            continue
        peak = max(timeline.peak_activations)
        lines.append(
            f"| {name} | {timeline.schedule.chunks} | {timeline.makespan:g} "
            f"| {100 * timeline.bubble_fraction:.1f} % "
            f"| {100 * timeline.overlapped_bubble_fraction:.1f} % "
            f"| {peak:g} | {peak / min(ranks, micro_batches):.2f} |"
        )
    return lines


def by_size() -> list[str]:
    """Bubble and peak as the pipeline grows, four micro-batches a rank."""
    sizes = (4, 8, 16, 32)
    lines = [
        "| method | " + " | ".join(f"p = {p}, m = {4 * p}" for p in sizes) + " |",
        "|---|" + "--:|" * len(sizes),
    ]
    for name in BIG:
        cells = []
        for p in sizes:
            timeline = run(name, ranks=p, micro_batches=4 * p)
            peak = max(timeline.peak_activations)
            cells.append(f"{100 * timeline.bubble_fraction:.1f} %, {peak:g}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def automatic() -> list[str]:
    """What the automatic scheduler makes of less and less memory."""
    lines = [
        "| memory limit | makespan | bubble | peak |",
        "|--:|--:|--:|--:|",
    ]
    for limit in (8, 7, 6, 5, 4):
        timeline = run("auto", ranks=8, micro_batches=32, limit=limit)
        lines.append(
            f"| {limit} | {timeline.makespan:g} | {100 * timeline.bubble_fraction:.1f} % "
            f"| {max(timeline.peak_activations):g} |"
        )
    return lines


def page(text: str) -> str:
    """The page with what stands between its markers written anew."""
    blocks = {
        "comparison": [*comparison(4, 8), "", *comparison(8, 32)],
        "sizes": by_size(),
        "automatic": automatic(),
    }
    for name, lines in blocks.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        assert rest, f"{PAGE} has no marker {start}"
        text = "\n".join([before + start, "", *lines, "", end]) + after
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wanted = {
        PICTURES / f"{name.replace('+', '-')}.svg": draw_svg(run(name, **options))
        for name, options in PICTURED.items()
    }
    wanted[PAGE] = page(PAGE.read_text(encoding="utf-8"))
    stale = [p for p, t in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != t]
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
