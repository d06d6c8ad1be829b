#!/bin/bash
# A sweep: functions build the arguments, a loop runs one job per TP.

model_args() {
    local layers=$1 hidden=${2:-4096}
    MODEL=(--num-layers "$layers" --hidden-size "$hidden" --num-attention-heads $((hidden / 128)))
    MODEL+=(--seq-length 4096 --max-position-embeddings 4096)
}

function train {
    local tp=$1
    shift
    local parallel="--tensor-model-parallel-size $tp --pipeline-model-parallel-size 1"
    if [ "$tp" -gt 1 ]; then
        parallel="$parallel --sequence-parallel --tp-comm-overlap"
        export CUDA_DEVICE_MAX_CONNECTIONS=1
    else
        unset CUDA_DEVICE_MAX_CONNECTIONS
    fi
    nohup torchrun --standalone --nproc_per_node=8 pretrain_gpt.py \
        "${MODEL[@]}" $parallel --micro-batch-size 1 --global-batch-size 64 --train-iters 50 --bf16 "$@" \
        > "log_tp$tp.txt" 2>&1
}

model_args 32
for tp in 1 4; do
    train $tp --use-distributed-optimizer --overlap-grad-reduce
done
