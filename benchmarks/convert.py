"""The share of other tools' keys that `flatout convert` maps.

    python benchmarks/convert.py

It converts a config with all keys that convert_keys.yaml lists for a tool, and counts the outcomes.
The result does not depend on the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measurement import markdown, parser, publish

from flatout.cli.commands.convert import HEADINGS
from flatout.config.convert import Item, convert
from flatout.config.documents import read_document

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
    rows = []
    for tool, row in found.items():
        keys, total = row["keys"], sum(row["keys"].values())
        shares = (keys[name] for name in ("mapped", "unnecessary", "missing", "unknown"))
        rows.append((tool, total, *(f"{count} ({count / total:.0%})" for count in shares)))
    sources = "; ".join(f"{tool}: {row['source']}" for tool, row in found.items())
    return markdown(
        "tool | keys | mapped | nothing to set | not in flatout | unknown",
        rows,
        f"Keys with values that users give them. Sources: {sources}.",
        "`python benchmarks/convert.py` counts them.",
    )


if __name__ == "__main__":
    given = parser(__doc__).parse_args()
    result = measure()
    publish(given.out, "convert", result, table(result))
