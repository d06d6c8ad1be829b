#!/bin/bash
# Everything is a positional parameter; options are collected in strings and run with eval.
set -e
ENV=$1
MEGATRON_PATH=$(dirname $(dirname "$(realpath "$0")"))
export PYTHONPATH=${MEGATRON_PATH}:$PYTHONPATH
export CUDA_DEVICE_MAX_CONNECTIONS=1

if [ $ENV = local ]; then
    NNODES=1
    NODE_RANK=0
    MASTER_ADDR=localhost
    MASTER_PORT=$(shuf -n 1 -i 10000-65535)
elif [ $ENV = cluster ]; then
    NNODES=${WORLD_SIZE}
    NODE_RANK=${RANK}
fi
GPUS_PER_NODE=8

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK \
 --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

MODEL_SIZE=$2
BATCH_SIZE=${3:-1}
GLOBAL_BATCH_SIZE=${4:-128}
SEQ_LEN=4096
TP=${5:-4}
PP=${6:-1}
AC=${7:-sel}
DO=${8:-true}
SP=${9:-true}
OUTPUT_BASEPATH=${10}

if [ $MODEL_SIZE = 7B ]; then

NUM_LAYERS=32
HIDDEN_SIZE=4096
NUM_ATTN_HEADS=32
INTERMEDIATE_SIZE=11008

elif [ $MODEL_SIZE = 13B ]; then

NUM_LAYERS=40
HIDDEN_SIZE=5120
NUM_ATTN_HEADS=40
INTERMEDIATE_SIZE=13824

fi

if [ -z ${EXTRA_VOCAB_SIZE} ]; then
    EXTRA_VOCAB_SIZE=0
fi

if [ $AC = full ]; then
    activation_checkpoint_options=" \
		    --recompute-method uniform \
            --recompute-num-layers 1 \
		    --recompute-granularity full"
elif [ $AC = sel ]; then
    activation_checkpoint_options=" \
        --recompute-activations"
elif [ $AC = none ]; then
    activation_checkpoint_options=" \
    "
fi

if [ $DO = true ]; then
    do_options=" \
		    --use-distributed-optimizer"

elif [ $DO = false ]; then
    do_options=" \
                    "
fi

if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_options=" \
		    --sequence-parallel"

elif [ $SP = false ]; then
    sp_options=" \
                    "
fi

NAME="llama2-${MODEL_SIZE}-tp-${TP}-pp-${PP}-$(date +%s)"
mkdir -p "${OUTPUT_BASEPATH}/checkpoint/${NAME}"

megatron_options="  \
        --save ${OUTPUT_BASEPATH}/checkpoint/${NAME} \
        --micro-batch-size ${BATCH_SIZE} \
        --global-batch-size ${GLOBAL_BATCH_SIZE} \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTN_HEADS} \
        --ffn-hidden-size ${INTERMEDIATE_SIZE} \
        --seq-length ${SEQ_LEN} \
        --max-position-embeddings ${SEQ_LEN} \
        --train-iters $((100000 / GLOBAL_BATCH_SIZE)) \
        --tensor-model-parallel-size ${TP} \
        --pipeline-model-parallel-size ${PP} \
        --swiglu \
        --bf16
        "

run_cmd="torchrun $DISTRIBUTED_ARGS pretrain_llama.py
 ${megatron_options} ${activation_checkpoint_options} ${do_options} ${sp_options}"

echo ${run_cmd}
eval ${run_cmd}
set +x
