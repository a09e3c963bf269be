"""The summary of a call of first_contact.py: targets, profiles and remaining steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from contact_results import Results
from throughput_entries import ENTRIES, TARGETS, Entry, Target
from throughput_profile import GROUPS, IDLE
from throughput_report import (
    Best,
    Measurements,
    best,
    best_of_ours,
    entry_against,
    figure,
    span,
    verdict,
)

NEAR = 0.03
"""An entry within this share of its target is measured again."""
WHAT = {"tokens_per_s": "tokens/s", "peak_gib": "GiB, at most"}
MOST_FAILURES = 5
MOST_CHARACTERS, LINES = 90, 40


def near_targets(found: Measurements) -> list[tuple[Entry, int | None]]:
    """Return the entries within 3% of a target, each at its best batch, and their baselines."""
    again: list[tuple[Entry, int | None]] = []
    for target in TARGETS:
        measured = verdict(found, target).get("measured")
        wanted = [figure for figure in (target.least, target.aim) if figure]
        ours = best_of_ours(found, target)
        if (
            measured is None
            or ours is None
            or not any(abs(measured / figure - 1) <= NEAR for figure in wanted)
        ):
            continue
        theirs = best(found, entry_against(target)) if target.against else None
        again += [(made.entry, made.rows[0]["rows"]) for made in (ours, theirs) if made is not None]
    return [pair for number, pair in enumerate(again) if pair not in again[:number]]


def summary(found: Measurements, results: Results, *, call: int, left: Sequence[str]) -> list[str]:
    """Return the lines that a call prints at its end, about 40 at most."""
    seconds = results.calls[-1]["seconds"] if results.calls else 0.0
    measured = [row for row in found.rows if row["status"] == "ok"]
    lines = [f"Call {call}: {seconds:.0f} s. {environment_line(results)}"]
    lines += (
        ["Toy shapes: they show that every step runs, and say nothing about speed."]
        if found.tiny
        else []
    )
    lines += [tests_line(results), "", *target_lines(found), "", *profile_lines(results)]
    roofs = [row["roof_tflops"] for row in measured if row.get("roof_tflops")]
    roof = (
        f" against {min(roofs):,.4g} to {max(roofs):,.4g} TFLOP/s of the matrix product"
        if roofs
        else ""
    )
    lines += [
        "",
        (
            f"{len(measured)} measurements{roof}; commits"
            f" {', '.join(sorted({str(row['commit']) for row in measured})) or 'none'}."
        ),
    ]
    bad = [row for row in found.rows if row["status"] != "ok"]
    lines += [
        f"{row['work']}/{row['entry']}, batch {row['rows']}: {row['status']}:"
        f" {row['reason'][:MOST_CHARACTERS]}"
        for row in bad[:MOST_FAILURES]
    ]
    lines += (
        [f"and {len(bad) - MOST_FAILURES} more without figures: throughput.md names them"]
        if len(bad) > MOST_FAILURES
        else []
    )
    remaining = (
        f"No time was left for these steps of this call: {'; '.join(left)}."
        if left
        else "All core steps of this call are done."
    )
    return shortened([*lines, remaining])


def shortened(lines: list[str]) -> list[str]:
    """Return at most 40 lines; unmeasured targets are dropped first, then the last lines."""
    empty = [line for line in lines if line.startswith("| ") and line.endswith("|  |  |  |")]
    gone = set(empty[: max(len(lines) - LINES, 0)])
    kept = [line for line in lines if line not in gone]
    return kept if len(kept) <= LINES else [*kept[: LINES - 1], kept[-1]]


def environment_line(results: Results) -> str:
    """Return the machine and its copy bandwidth."""
    held = results.of("environment")
    if "packages" not in held:
        return (
            f"The environment is unknown: {'; '.join(held.get('failed', ['it was not measured']))}."
        )
    packages = ", ".join(
        f"{name} {version or 'missing'}" for name, version in held["packages"].items()
    )
    copies = f"; copies at {held['copy_tb_per_s']:.2f} TB/s" if "copy_tb_per_s" in held else ""
    return f"{held['machine']}; Python {held['python']}, {packages}{copies}."


def tests_line(results: Results) -> str:
    """Return the outcome of the GPU tests."""
    held = results.of("tests")
    if not held:
        return "GPU tests: not run yet."
    ended = {"ok": "", "timed-out": ", before the time limit", "failed": ": they did not run"}[
        held["status"]
    ]
    line = (
        f"GPU tests: {held.get('passed', 0)} passed, {len(held['failed'])} failed,"
        f" {held.get('skipped', 0)} skipped in {held['seconds']:.0f} s{ended}"
    )
    return (
        line
        + (": " + "; ".join(held["failed"])[: 2 * MOST_CHARACTERS] if held["failed"] else "")
        + "."
    )


def target_lines(found: Measurements) -> Iterator[str]:
    """Yield a table of the targets with predictions and measurements."""
    yield "| | target | predicted | measured | by | times nanoGPT |"
    yield "|---|---|---|---|---|---|"
    for target in TARGETS:
        row = verdict(found, target)
        verdicts = {True: " (kept)", False: " (missed)", None: ""}
        kept = "" if found.tiny or row.get("measured") is None else verdicts[row.get("kept")]
        wanted = " / ".join(figure(value) for value in (target.least, target.aim) if value)
        name = f"{target.work}: {WHAT.get(target.what, f'times {target.against}')}"
        measured = figure(row.get("measured")) + kept
        yield (
            f"| {name} | {wanted} | {span(target.predicted)} | {measured} | {row.get('by') or ''} |"
            f" {times_nanogpt(found, target)} |"
        )


def times_nanogpt(found: Measurements, target: Target) -> str:
    """Return the best flatout rate over nanoGPT's best, or an empty string if either is missing."""
    ours = best_of_ours(found, target)
    peers = [
        made
        for entry in ENTRIES
        if (entry.work, entry.name) == (target.work, "nanogpt") and (made := best(found, entry))
    ]
    if target.what != "tokens_per_s" or ours is None or not peers:
        return ""
    theirs: Best = peers[0]
    return f"{ours.tokens_per_s / theirs.tokens_per_s:.3f}"


def profile_lines(results: Results) -> Iterator[str]:
    """Yield a table of the time per step by group, one column per profiled entry."""
    good = {name: profile for name, profile in results.profiles.items() if profile.get("groups")}
    for name, profile in results.profiles.items():
        if name not in good:
            yield (
                f"The profile of {name} failed: {profile.get('failed', 'no kernels recorded')}"[
                    : 2 * MOST_CHARACTERS
                ]
            )
    if not good:
        return
    yield (
        "| time per step, profiled | "
        + " | ".join(f"{name}, {profile['wall_ms']:.1f} ms" for name, profile in good.items())
        + " |"
    )
    yield "|---|" + "---|" * len(good)
    for group in GROUPS:
        if any(profile["groups"].get(group) for profile in good.values()):
            yield (
                f"| {group} | "
                + " | ".join(share(profile, group) for profile in good.values())
                + " |"
            )


def share(profile: dict[str, Any], group: str) -> str:
    """Return a group's milliseconds and its share of the step."""
    milliseconds = profile["groups"].get(group, 0.0)
    return (
        f"{milliseconds:.2f} ms, {100 * milliseconds / profile['wall_ms']:.1f}%"
        if milliseconds or group == IDLE
        else ""
    )


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/first_contact.py; run: python benchmarks/first_contact.py"
        " --help"
    )
