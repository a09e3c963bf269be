"""Hardware and processes that this machine lacks."""

from case import Case, table

UNDER_TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
PIPELINE = "plan my.yaml parallel.pipeline=2"
INTERLEAVED, ONE_ROW = "parallel.pipeline_schedule=interleaved", "batch.rows_per_device=1"


CASES = [
    Case(
        "a GPU recipe on a machine without one",
        "train my.yaml train.device=cuda",
        ("train.device=cuda", "no NVIDIA driver"),
        ("train.device=auto would run on the CPU (a CPU, 2 cores)",),
    ),
    Case(
        "the GPU of a Mac on another machine",
        "train my.yaml train.device=mps",
        ("train.device=mps", "a Mac"),
        ("Remove train.device",),
        lambda w: w.patch.setattr("torch.backends.mps.is_available", lambda: False),
    ),
    *table(f"""
a pipeline of a tied embedding
    {PIPELINE} model.num_layers=2 {ONE_ROW}
    parallel.pipeline=2 | the last one the head -> model.tied_head=false
a pipeline of fewer blocks
    {PIPELINE} model.tied_head=false {ONE_ROW}
    model.num_layers=1 | 2 stages | parallel.pipeline=2 -> model.num_layers=2
a pipeline whose stages do not divide the blocks
    {PIPELINE} {INTERLEAVED} model.num_layers=6 model.tied_head=false {ONE_ROW}
    model.num_layers=6 | 4 stages -> model.num_layers=8
a pipeline with an odd number of micro-batches
    {PIPELINE} {ONE_ROW} batch.tokens_per_step=96
    multiple of parallel.pipeline=2 | has 3 -> batch.accumulate=4
a pipeline with LoRA
    {PIPELINE} batch.rows_per_device=2 lora.rank=2 train.init_from=runs/first
    parallel.pipeline | lora.rank=2 -> Remove one
a pipeline in host memory
    {PIPELINE} parallel.offload=cpu
    parallel.pipeline=2 | parallel.offload=cpu -> Remove one
a pipeline with length buckets
    {PIPELINE} speedups=auto,+length-buckets model.num_layers=2 model.tied_head=false {ONE_ROW}
    length-buckets -> Remove
a schedule that does not exist
    {PIPELINE} parallel.pipeline_schedule=zero-bubble
    parallel.pipeline_schedule | 1f1b -> interleaved
a schedule without a pipeline
    train my.yaml parallel.pipeline_schedule=interleaved
    parallel.pipeline_schedule=interleaved | no effect -> Set parallel.pipeline
"""),
    *table("""
a GPU that does not exist
    train my.yaml train.device=cuda:7
    cuda:7 -> train.device=auto
a sharded run in one process
    train my.yaml parallel.shard=2
    parallel.shard=2 | 1 process -> torchrun --nproc-per-node 2
sizes that do not multiply to the processes
    train my.yaml train.devices=2 parallel.replicate=2 parallel.shard=2
    parallel.replicate=2 x parallel.shard=2 | 2 processes -> parallel.replicate=auto
processes that share rows and are no part of the shards
    train my.yaml train.devices=2 parallel.shard=2 parallel.context=3
    parallel.context=3 | parallel.shard=2 -> a divisor of 2
more processes than sequences in a step
    train my.yaml train.devices=8
    batch.tokens_per_step=128 | 8 processes -> batch.tokens_per_step=1024
a stored run on processes that its steps do not divide among
    train my.yaml --run-dir runs/first train.devices=3
    4 sequences | 3 processes -> Start 1, 2, 4 processes
"""),
    Case(
        "some of torchrun's variables missing",
        "train my.yaml",
        ("WORLD_SIZE",),
        ("torchrun",),
        lambda w: w.patch.setenv("RANK", "0"),
    ),
    Case(
        "more processes than torchrun started",
        "train my.yaml train.devices=3",
        ("train.devices=3", "2 were started"),
        ("Remove train.devices",),
        lambda w: [w.patch.setenv(*one) for one in UNDER_TORCHRUN.items()],
    ),
    Case(
        "several processes on one GPU",
        "train my.yaml train.device=cuda:0 train.devices=2",
        ("train.device=cuda:0", "train.devices=2"),
        ("train.device=cuda",),
    ),
    Case(
        "a cache directory that depends on the current one",
        "train my.yaml",
        ("FLATOUT_CACHE=cache", "current directory"),
        ("full path",),
        lambda w: w.patch.setenv("FLATOUT_CACHE", "cache"),
    ),
    Case(
        "a file as the cache directory",
        "prepare rows.jsonl --out data/new --tokenizer byte",
        ("FLATOUT_CACHE=", "book.txt", "is a file"),
        ("Name a directory",),
        lambda w: w.patch.setenv("FLATOUT_CACHE", str(w.path / "book.txt")),
    ),
    *table("""
a speedup that needs a GPU
    train my.yaml speedups=tf32
    'tf32' -> Remove it: speedups=none
a plan for a machine that is not known
    plan my.yaml --machine '8x H1000'
    'H1000' -> 'H100'
a plan for a card of several kinds
    plan my.yaml --machine A800
    'A800' | several -> a800-pcie-80gb
a plan of a CPU run for a GPU
    plan my.yaml --machine H100
    train.device=cpu | H100 -> Remove one of the two
a plan of a run on four GPUs for eight
    plan my.yaml train.device=cuda train.devices=4 --machine '8x H100'
    train.devices=4 | 8x H100 -> Remove one of the two
a plan without a vocabulary size
    plan my.yaml data.path=data/none
    vocabulary size -> model.vocab_size
"""),
]
