#!/bin/bash
#SBATCH -N 4
#SBATCH --gpus-per-node=8
# The job itself is a here-document; what it needs is exported first.
source /etc/profile.d/modules.sh
module load cuda nccl

export EP=8 PP=4
export CUDA_DEVICE_MAX_CONNECTIONS=1

srun --ntasks-per-node=1 --export=ALL,NCCL_NVLS_ENABLE=0 bash <<'EOT'
RDZV_ARGS="--rdzv-backend c10d --rdzv-endpoint $(hostname):29500"
# Attention stays on one GPU, experts are spread over a node.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size ${PP}
    --expert-model-parallel-size ${EP}
    --num-layers-per-virtual-pipeline-stage 2
)
torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 $RDZV_ARGS pretrain_gpt.py \
    "${PARALLEL_ARGS[@]}" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 \
    --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall --moe-layer-freq '([1]*32)' \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 256 --train-samples 4000000 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --overlap-moe-expert-parallel-comm --bf16
EOT
