"""Lines about epochs."""

from flatout.cli.terminal.panel import Epochs


def lines_of(epochs, count, *, every=10, seconds_per_step=1.0, steps_per_epoch=20):
    """The lines of a run with `every` steps per record and 8 samples per step."""
    for step in range(every, count + 1, every):
        line = epochs.line(
            {
                "step": step,
                "wall_s": step * seconds_per_step,
                "train/loss": 3.0,
                "train/epoch": step / steps_per_epoch,
                "perf/steps_per_s": 1.25 / seconds_per_step,
                "perf/samples_per_s": 8 * 1.25 / seconds_per_step,
            }
        )
        if line:
            yield line


def test_requested_epochs_state_their_time_and_samples_per_second():
    """The time includes evaluations and saves, the rate does not."""
    epochs = Epochs(0.0, total=3, last_step=60)
    assert list(lines_of(epochs, 60)) == [
        f"Epoch {n} of 3 done at step {20 * n}: mean training loss 3.0000, 20 s, 10 samples/s"
        for n in (1, 2, 3)
    ]


def test_a_run_of_steps_states_neither_and_half_an_epoch_has_no_line():
    epochs = Epochs(0.0, total=None, last_step=60)
    assert next(lines_of(epochs, 60)) == "Epoch 1 done at step 20: mean training loss 3.0000"
    assert list(lines_of(Epochs(0.0, total=0.5, last_step=10), 10)) == []


def test_a_resumed_run_counts_from_its_epoch():
    epochs = Epochs(1.5, total=3, last_step=60)
    line = epochs.line({"step": 40, "wall_s": 9.0, "train/loss": 2.0, "train/epoch": 2.0})
    assert line == "Epoch 2 of 3 done at step 40: mean training loss 2.0000, 9.0 s"


def test_quick_epochs_share_a_line_and_the_last_one_always_has_one():
    epochs = Epochs(0.0, total=30, last_step=600)
    lines = list(lines_of(epochs, 600, seconds_per_step=0.018))
    assert [line.split(" done")[0] for line in lines] == [
        "Epoch 1 of 30",
        "Epochs 2 to 15 of 30",
        "Epochs 16 to 29 of 30",
        "Epoch 30 of 30",
    ]
