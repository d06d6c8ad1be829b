#!/bin/bash
#SBATCH --job-name=llama3-8b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive

# Data parallel only, and still one connection: copied from the job with TP.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NVTE_FUSED_ATTN=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=6000

IMAGE=${IMAGE:-nvcr.io/nvidia/nemo:26.04}
WORK_DIR=$PWD

OPTIONS=" \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --seq-length 8192 --max-position-embeddings 8192 \
    --micro-batch-size 1 --global-batch-size 128 \
    --train-samples 1000000 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --swiglu --normalization RMSNorm --bf16"

run_cmd="cd $WORK_DIR && python -u pretrain_gpt.py ${OPTIONS} --save /results/\$SLURM_JOB_ID"

srun -l --container-image "$IMAGE" --container-mounts "$WORK_DIR:$WORK_DIR" \
     --output=logs/%x_%j.log bash -c "${run_cmd}"
