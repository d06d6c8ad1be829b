#!/bin/bash
# GPT of 22 B parameters on two DGX nodes: arrays of arguments, TP overlap switched on by TP alone.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_IB_TIMEOUT=22

GPUS_PER_NODE=8
NUM_NODES=2
MASTER_ADDR=${MASTER_ADDR:-localhost}
WORLD_SIZE=$((GPUS_PER_NODE * NUM_NODES))
TP=8

CHECKPOINT_PATH=${1:?"where do checkpoints go?"}
DATA_PATH=$2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port 6000
)

GPT_MODEL_ARGS=(
    --num-layers 48
    --hidden-size 6144
    --num-attention-heads 64
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 256     # 64 microbatches per replica
    --train-iters 500000
    --lr 1.0e-4
    --lr-decay-style cosine
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

# Splitting the layers pays only when their communication is hidden.
if [ $TP -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=(--tp-comm-overlap)
fi

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt
    --split 949,50,1
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH"
