"""The line of `train` about each event."""

import pytest

from flatout.cli.terminal.panel import event_line

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
            "Training continues. They are sent later.",
        ),
        (
            {"event": "upload_pending", "steps": [4, 5], "reason": "there was too little time"},
            "Not yet sent to s3://bucket/runs/x: step 4, 5 (there was too little time). "
            "The next start of this run sends it.",
        ),
        ({"event": "upload_of_something_else"}, None),
        (
            {"event": "resume", "step": 70, "last_step": 1500, "from_checkpoint": "r/step-70"},
            "Resuming at step 70 of 1,500 from r/step-70",
        ),
        (
            {"event": "evaluation", "loss": 2.33564, "tokens": 111_540},
            "Whole validation split: loss 2.3356 on 111,540 tokens",
        ),
        ({"event": "alarm", "kind": "x", "text": "It fell {12%}."}, "Alarm: It fell {12%}."),
        ({"event": "alarm_over", "kind": "x", "text": "It is back."}, "It is back."),
        ({"event": "logger", "logger": "wandb", "text": "https://a/b"}, "wandb: https://a/b"),
        (
            {"event": "no_mlflow", "logger": "mlflow", "reason": "rejected"},
            "The logger mlflow has failed and is disabled (rejected). Training continues. "
            "metrics.jsonl has the same metrics.",
        ),
    ],
)
def test_each_event_has_its_line(event, line):
    assert event_line(event | {"url": URL}) == line
