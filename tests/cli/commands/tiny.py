"""The shape of the tiny runs of these tests."""

TINY_SHAPE = [
    "model.num_layers=1",
    "model.d_model=16",
    "model.num_heads=1",
    "data.seq_len=32",
    "batch.rows_per_device=4",
    "batch.tokens_per_step=128",
    "train.device=cpu",
]
