"""What the terminal says about the mirror of a run's checkpoints."""

from __future__ import annotations

from flatout.json_io import JsonObject
from flatout.progress import readable_size


def mirror_line(event: JsonObject) -> str | None:
    """Return a line about a checkpoint sent, or not sent, to the mirror; None for other events."""
    match event.get("event"):
        case "upload":
            size = readable_size(event["bytes"])
            return f"Sent step {event['step']:,} to {event['url']}: {size}"
        case "upload_failed" if "fix" in event:
            return (
                f"Checkpoints are no longer sent to {event['url']}. {event['reason']}. Training "
                f"continues here. {event['fix']}"
            )
        case "upload_failed":
            return (
                f"Checkpoints cannot be sent to {event['url']} now ({event['reason']}). "
                "Training continues; they are sent later."
            )
        case "upload_dropped":
            return (
                f"Step {event['step']:,} was deleted here before it could be sent to "
                f"{event['url']}: saves are faster than uploads."
            )
        case "upload_pending":
            steps = ", ".join(f"{step:,}" for step in event["steps"])
            return (
                f"Not yet sent to {event['url']}: step {steps} ({event['reason']}). The next start "
                "of this run sends it."
            )
    return None
