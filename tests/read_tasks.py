"""Read tasks of made-up documents."""

from flatout.data.sources import BadRow, ReadTask

BAD = BadRow("is bad", "Mend it.", "bad", "row")


def tasks_of(*groups):
    """Return read tasks with the given rows; a number stands for that many documents."""
    made, count = [], 0
    for group in groups:
        rows = group
        if isinstance(group, int):
            rows = [f"document {count + index}" for index in range(group)]
        count += len(rows)
        size = sum(len(row) for row in rows if isinstance(row, str))
        made.append(ReadTask(list, (tuple(rows),), "x", num_bytes=size))
    return made
