#!/bin/sh
# Change the numbers of machines and GPUs and the recipe. Then start it on each machine, with the
# address of the first: sh torchrun.sh HOST
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
    --rdzv-backend c10d --rdzv-id flatout --rdzv-endpoint "${1:-127.0.0.1}:29500" \
    -m flatout train my.yaml --run-dir runs/first
