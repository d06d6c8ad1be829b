#!/bin/bash
# Overlap is a matter of switches around the arguments.
OVERLAP=${OVERLAP:-all}
DETERMINISTIC=0
LOG_DIR=logs

ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 2
    --sequence-parallel
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 1000
    --use-distributed-optimizer
    --bf16
)

[ -d "$LOG_DIR" ] || mkdir -p "$LOG_DIR"

case "$OVERLAP" in
    all)
        ARGS+=(--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap)
        ;;
    dp | data-parallel)
        ARGS+=(--overlap-grad-reduce --overlap-param-gather)
        ;;
    none)
        ARGS+=(--no-overlap-p2p-communication)
        ;;
    *)
        echo "OVERLAP is all, dp or none" >&2
        exit 1
        ;;
esac

(( DETERMINISTIC == 1 )) && { export NCCL_ALGO=Ring; ARGS+=(--deterministic-mode); }

if [[ -n "$TENSORBOARD" && $TENSORBOARD != none ]]; then
    echo "writing to $TENSORBOARD"
fi

CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
