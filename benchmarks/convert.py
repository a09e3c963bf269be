"""The share of other tools' keys that `flatout convert` maps.

    python benchmarks/convert.py

It converts a config with all keys that convert_keys.yaml lists for a tool, and counts the outcomes.
The result does not depend on the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from main_job import RESULTS

from flatout.commands.convert import HEADINGS
from flatout.config.convert import Item, convert
from flatout.documents import read_document
from flatout.json_io import write_json

KEYS = Path(__file__).with_name("convert_keys.yaml")


def measure() -> dict[str, Any]:
    """Return the source and the number of keys by outcome, for each tool."""
    return {
        tool: {"source": listed["source"], "keys": counts(listed)}
        for tool, listed in read_document(KEYS).items()
    }


def items(listed: dict[str, Any]) -> list[Item]:
    """Return what becomes of each key that is listed for a tool."""
    document = listed["values"] | dict.fromkeys(listed["switches"].split(), True)
    return convert(document, []).items


def counts(listed: dict[str, Any]) -> dict[str, int]:
    """Return the number of keys by outcome."""
    found = [str(item.outcome) for item in items(listed)]
    return {name: found.count(name) for name in HEADINGS}


def table(found: dict[str, Any]) -> str:
    """Return the counts as a table in Markdown."""
    lines = [
        "| tool | keys | mapped | nothing to set | not in flatout | unknown |",
        "|---|---|---|---|---|---|",
    ]
    for tool, row in found.items():
        keys, total = row["keys"], sum(row["keys"].values())
        shares = (keys[name] for name in ("mapped", "unnecessary", "missing", "unknown"))
        cells = " | ".join(f"{count} ({count / total:.0%})" for count in shares)
        lines.append(f"| {tool} | {total} | {cells} |")
    sources = "; ".join(f"{tool}: {row['source']}" for tool, row in found.items())
    lines += ["", f"Keys with values that users give them. Sources: {sources}."]
    return "\n".join([*lines, "`python benchmarks/convert.py` counts them.", ""])


if __name__ == "__main__":
    result = measure()
    write_json(RESULTS / "convert.json", result)
    (RESULTS / "convert.md").write_text(table(result), encoding="utf-8")
    print(table(result))
