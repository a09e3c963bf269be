"""The lines about a mirror."""

import pytest

from flatout.terminal.run import event_line

URL = "s3://bucket/runs/x"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "upload", "step": 1200, "bytes": 1_500_000_000, "seconds": 3.0},
            "Sent step 1,200 to s3://bucket/runs/x: 1.5 GB",
        ),
        (
            {"event": "upload_failed", "reason": "no route"},
            "Checkpoints cannot be sent to s3://bucket/runs/x now (no route). "
            "Training continues; they are sent later.",
        ),
        (
            {"event": "upload_failed", "reason": "It continues on nodeB", "fix": "Do that."},
            "Checkpoints are no longer sent to s3://bucket/runs/x. It continues on nodeB. "
            "Training continues here. Do that.",
        ),
        (
            {"event": "upload_dropped", "step": 5},
            "Step 5 was deleted here before it could be sent to s3://bucket/runs/x: "
            "saves are faster than uploads.",
        ),
        (
            {"event": "upload_pending", "steps": [4, 5], "reason": "there was too little time"},
            "Not yet sent to s3://bucket/runs/x: step 4, 5 (there was too little time). "
            "The next start of this run sends it.",
        ),
        ({"event": "upload_of_something_else"}, None),
    ],
)
def test_what_is_said_about_an_upload(event, line):
    assert event_line(event | {"url": URL}) == line
