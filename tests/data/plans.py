"""A small batch plan for every test that feeds steps."""

from flatout.data.load.batches import BatchPlan


def batch_plan(**changes):
    values = {
        "seq_len": 8,
        "rows_per_device": 2,
        "accumulate": 2,
        "dp_rank": 0,
        "dp_size": 1,
        "seed": 7,
        "document_mask": False,
        "prefetch": 2,
        "device": "cpu",
    }
    return BatchPlan(**values | changes)
