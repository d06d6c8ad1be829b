#!/bin/sh
# The container gets its own environment: what is exported here does not reach it.
export CUDA_DEVICE_MAX_CONNECTIONS=8
GPUS=8
TP=4

docker run --rm --gpus all --ipc=host --shm-size=64g \
    -e CUDA_DEVICE_MAX_CONNECTIONS=1 -e NCCL_DEBUG \
    --env "TP_SIZE=$TP" -v "$HOME/data:/data" \
    nvcr.io/nvidia/pytorch:26.01-py3 bash -lc '
        set -e
        cd /opt/megatron-lm
        torchrun --nproc-per-node='"$GPUS"' pretrain_gpt.py \
            --tensor-model-parallel-size $TP_SIZE --sequence-parallel \
            --num-layers 16 --hidden-size 2048 --num-attention-heads 16 \
            --seq-length 1024 --max-position-embeddings 1024 \
            --micro-batch-size 4 --global-batch-size 64 --train-iters 20 \
            --tp-comm-overlap --bf16
    '
