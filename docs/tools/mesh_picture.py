"""Draw what each of 8 GPUs has on six meshes: `python docs/tools/mesh_picture.py`.

Writes docs/assets/meshes.svg. Rows, tokens and parts are those that flatout computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from flatout.config.sections import ParallelConfig
from flatout.distributed.context import Context
from flatout.distributed.layout import layout_of
from flatout.distributed.tensor import Split

PICTURE = Path(__file__).parents[1] / "assets" / "meshes.svg"
GPUS, BLOCKS, PARTS, TOKENS = 8, 8, 8, 8
"""GPUs, blocks of the model, and the parts into which weights and rows are drawn."""
CELL, GAP, LEFT, FIRST = 9, 18, 108, 72
"""Pixels: a cell, between boxes, left of the first box and above it. All are multiples of a cell,
as the pattern of cells is one of the whole picture."""
SIDE, HEIGHT = 8 * CELL, 26 * CELL
"""Pixels of a box, and from one mesh to the next."""
COLORS = {"rows": "#2e7d4f", "shared": "#a5d6b5", "weights": "#2f5fa8", "other": "#eceff1"}
MESHES = {
    "no keys": ({}, "8 copies of the model, which average their gradients (DDP)"),
    "parallel.shard=8": (
        {"shard": 8},
        "each keeps an eighth of every block, and gathers a block while it computes it (FSDP)",
    ),
    "parallel.shard=4": (
        {"shard": 4},
        "two machines of four GPUs: sharded inside, copied between them (HSDP)",
    ),
    "parallel.tensor=4": (
        {"tensor": 4},
        "four share a row: each computes a quarter of every matrix, and between matrices (dark) "
        "of the tokens",
    ),
    "parallel.shard=8 parallel.context=2": (
        {"shard": 8, "context": 2},
        "two share a row: each computes its start and end, or its middle; weights as with shard=8",
    ),
    "parallel.pipeline=4": (
        {"pipeline": 4},
        "four stages of two blocks; two GPUs have each stage, with different rows",
    ),
}
"""The keys of each mesh, and what happens on it."""


@dataclass(frozen=True)
class Held:
    """What one GPU has."""

    row: int
    """The row of a micro-batch that it computes."""
    num_rows: int
    """Rows that all of them compute at a time."""
    tokens: range | tuple[int, ...]
    """The parts of the row that it computes between matrices."""
    reads: range | tuple[int, ...]
    """The parts of the row that enter its matrices."""
    parts: range
    """The parts of each of its blocks that it keeps."""
    blocks: range


def held(rank: int, **sizes: int) -> Held:
    """Return what the GPU `rank` has on a mesh."""
    config = ParallelConfig(**sizes)
    layout = layout_of(config, GPUS)
    group = layout.context * layout.tensor
    tokens: tuple[int, ...] | range = range(TOKENS)
    if layout.context > 1:
        context = Context(None, rank % layout.context, layout.context, is_balanced=True)
        tokens = tuple(each for span in context.spans(TOKENS) for each in range(*span))
    reads = tokens
    if layout.tensor > 1:
        spans = Split(None, rank % layout.tensor, layout.tensor).spans(TOKENS)
        tokens = range(*spans[0])
    divided = layout.shard * layout.tensor
    part, stage = rank % divided, rank * layout.pipeline // GPUS
    own, length = PARTS // divided, BLOCKS // layout.pipeline
    return Held(
        row=rank // group % layout.dp_size,
        num_rows=layout.dp_size,
        tokens=tokens,
        reads=reads,
        parts=range(part * own, (part + 1) * own),
        blocks=range(stage * length, (stage + 1) * length),
    )


def _cells(x: int, y: int, columns: Collection[int], rows: Collection[int], color: str) -> str:
    """Return the cells in some columns and some consecutive rows of the box at (x, y)."""
    runs = [columns] if isinstance(columns, range) else [[column] for column in columns]
    return "".join(
        f'<rect x="{x + CELL * min(run)}" y="{y + CELL * min(rows)}" width="{CELL * len(run)}" '
        f'height="{CELL * len(rows)}" fill="url(#{color})"/>'
        for run in runs
    )


def _text(x: int, y: int, text: str, size: int = 12, **more: str) -> str:
    options = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}"{options}>{text}</text>'


def panel(top: int, keys: str, sizes: dict[str, int], note: str) -> list[str]:
    """Return the drawing of a mesh, `top` pixels down."""
    blocks_y = top + SIDE + CELL
    drawn = [
        _text(16, top - 46, keys, 15, font_weight="bold", font_family="monospace"),
        _text(16, top - 27, note, 13, fill="#455a64"),
    ]
    for y, words in ((top, ("rows of a", "micro-batch")), (blocks_y, ("blocks of", "the model"))):
        drawn += [_text(16, y + 30 + 15 * line, word) for line, word in enumerate(words)]
    for rank in range(GPUS):
        found, x = held(rank, **sizes), LEFT + rank * (SIDE + GAP)
        drawn += [
            _text(x, top - 5, f"GPU {rank}", fill="#455a64"),
            _cells(x, top, range(TOKENS), range(found.num_rows), "other"),
            _cells(x, top, found.reads, [found.row], "shared"),
            _cells(x, top, found.tokens, [found.row], "rows"),
            _cells(x, blocks_y, range(PARTS), range(BLOCKS), "other"),
            _cells(x, blocks_y, found.parts, found.blocks, "weights"),
        ]
    return drawn


def drawing() -> str:
    """Return the picture as SVG."""
    width, height = LEFT + GPUS * (SIDE + GAP), len(MESHES) * HEIGHT
    lines = [
        line
        for number, (keys, (sizes, note)) in enumerate(MESHES.items())
        for line in panel(FIRST + number * HEIGHT, keys, sizes, note)
    ]
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">'
    )
    patterns = [
        f'<pattern id="{name}" width="{CELL}" height="{CELL}" patternUnits="userSpaceOnUse">'
        f'<rect width="{CELL - 1}" height="{CELL - 1}" fill="{color}"/></pattern>'
        for name, color in COLORS.items()
    ]
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([start, *patterns, ground, *lines, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
