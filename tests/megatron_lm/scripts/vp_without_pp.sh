#!/usr/bin/env bash
# Defaults that the environment may override; the pipeline was set to 1 and its interleaving stayed.
: "${TP:=4}"
: "${PP:=1}"
: ${VPP_LAYERS:=4}
NNODES=${SLURM_NNODES:-2}
export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_FWD_LAYERNORM_SM_MARGIN=16

ARGS=""
ARGS+=" --tensor-model-parallel-size ${TP} --sequence-parallel"
ARGS+=" --pipeline-model-parallel-size ${PP}"
ARGS+=" --num-layers-per-virtual-pipeline-stage ${VPP_LAYERS}"
ARGS+=" --num-layers 40 --hidden-size 5120 --num-attention-heads 40"
ARGS+=" --seq-length 4096 --max-position-embeddings 4096"
ARGS+=" --micro-batch-size 1 --global-batch-size 256 --train-iters 250000"
ARGS+=" --use-distributed-optimizer --overlap-grad-reduce"
ARGS+=" --bf16"

exec python -m torch.distributed.run \
    --nnodes="$NNODES" --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-endpoint="$(hostname):29400" \
    pretrain_gpt.py $ARGS "$@"
