"""The planner's accuracy as text, and as the tables of docs/planner.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _line(name: str, s: Mapping[str, float]) -> str:
    if not s["rows"]:
        return f"  {name:48s}   0 rows"
    return (
        f"  {name:48s} {int(s['rows']):3d} rows  mean {s['mean_abs_error']:6.1%}"
        f"  median {s['median_abs_error']:6.1%}  bias {s['bias']:+6.1%}"
    )


def show(result: Mapping[str, Any]) -> None:
    out = print
    out("Step time, |predicted / measured - 1|")
    out(
        f"  all modelled rows: mean {result['step_time_mean_abs_error']:.1%}, median "
        f"{result['step_time_median_abs_error']:.1%} ({result['rows_used']} rows used, "
        f"{result['rows_not_modelled']} not modelled)"
    )
    for ident, reason in result["not_modelled"].items():
        out(f"    not modelled: {ident}: {reason}")
    for key in ("dense", "long_context", "moe"):
        out(_line(key, result[key]))
    for half in result.get("halves", ()):
        out(_line(f"fitted on half {half['fitted_on']}, on it (dense)", half["on_it"]))
        out(_line(f"fitted on half {half['fitted_on']}, on the other", half["on_the_other"]))
    titles = (
        ("By source", "by_source"),
        ("By source, rows that were not fitted", "not_fitted_by_source"),
        ("By accelerator and software", "by_accelerator"),
        ("By size", "by_size"),
    )
    for title, key in titles:
        if key not in result:
            continue
        out(title)
        for name, s in result[key].items():
            out(_line(name, s))
    out("Ranking of 5 and more layouts")
    for r in result["ranking"]:
        out(
            f"  {r['source']} {r['model']} on {r['devices']}: {r['rows']} rows within "
            f"{r['spread']:.0%}, Spearman {r['spearman']:.2f} (a repeat "
            f"{r['spearman_of_a_repeat']:.2f} at {r['noise']:.1%} noise), chosen "
            f"{r['chosen_over_best']:+.1%} over the best"
        )
    out("Out of memory")
    out(
        f"  right {result['oom_accuracy']:.1%} of {result['oom_rows']} failed and "
        f"{result['fitting_rows']} fitting rows; failed but predicted to fit "
        f"{result['oom_missed']:.1%}"
    )
    for half in result.get("oom_halves", ()):
        out(
            f"  constants picked on half {half['picked_on']} ({half['fixed_gib']} GiB and "
            f"{half['share']:.0%}): right {half['oom_accuracy']:.1%} of the {half['rows']} rows of "
            f"the other, missed {half['oom_missed']:.1%}"
        )
    out(f"  missed: {', '.join(result['missed']) or 'none'}")
    out(f"  refused though they ran: {', '.join(result['refused']) or 'none'}")
    stated = result["memory"]
    if stated["rows"]:
        out(
            f"Memory where it is stated: {stated['rows']} rows, mean "
            f"{stated['mean_abs_error']:.1%}, bias {stated['bias']:+.1%}"
        )
    out("Anchors, predicted beside published")
    for a in result["anchors"]:
        rate = ""
        if "published_tflops" in a:
            rate = f"  {a['predicted_tflops']:5.0f} for {a['published_tflops']:.0f} TFLOP/s"
        out(
            f"  {a['id']:9s} {a['model'][:28]:28s} {a['devices']:5d} {a['layout'][:34]:34s} "
            f"{a['recompute'][:9]:9s} {a['predicted_seconds']:7.2f} for "
            f"{a['published_seconds']:7.2f} s {a['error']:+6.1%}{rate}"
        )


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of docs/planner.md."""
    lines = ["| what | rows | mean | median |", "|---|---|---|---|"]

    def add(name: str, s: Mapping[str, float]) -> None:
        lines.append(
            f"| {name} | {int(s['rows'])} | {s['mean_abs_error']:.1%} | "
            f"{s['median_abs_error']:.1%} |"
        )

    add("dense rows, fitted on all", result["dense"])
    for half in result["halves"]:
        add(f"fitted on half {half['fitted_on']}, on that half", half["on_it"])
        add(f"fitted on half {half['fitted_on']}, on the other half", half["on_the_other"])
    add("long context (32k tokens and more), beside", result["long_context"])
    add("mixture of experts, beside", result["moe"])
    lines += [
        "",
        "| source, each row under the fit of the half it is not in | rows | mean | median |",
    ]
    lines.append("|---|---|---|---|")
    for name, s in result["not_fitted_by_source"].items():
        add(name, s)
    lines += [
        "",
        "| layouts of one model on one machine | rows | Spearman | noise | of a repeat | best |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for r in result["ranking"]:
        lines.append(
            f"| {r['source']} {r['model']} on {r['devices']} | {r['rows']} | {r['spearman']:.2f} | "
            f"{r['noise']:.1%} | {r['spearman_of_a_repeat']:.2f} | {r['chosen_over_best']:+.1%} |"
        )
    lines += [
        "",
        "| anchor | model | devices | layout | recompute | published | predicted | error |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for a in result["anchors"]:
        unit = "TFLOP/s" if "published_tflops" in a else "s"
        stated, told = a["published_seconds"], a["predicted_seconds"]
        shown = f"{stated:.2f} {unit} | {told:.2f} {unit}"
        if unit == "TFLOP/s":
            shown = f"{a['published_tflops']:.0f} {unit} | {a['predicted_tflops']:.0f} {unit}"
        lines.append(
            f"| {a['id']} | {a['model']} | {a['devices']} | {a['layout']}, micro-batch "
            f"{a['micro_batch']} | {a['recompute']} | {shown} | {a['error']:+.1%} |"
        )
    return "\n".join(lines)
