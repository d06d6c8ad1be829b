#!/bin/bash
# Writes and submits a job; FSDP is the default, and the line for TP was never taken out.
NODES=${NODES:-4}
USE_MEGATRON_FSDP=${USE_MEGATRON_FSDP:-1}
MBS=${MBS:-1}
GBS=${GBS:-256}
OUTPUT=${OUTPUT:-"results"}

PRETRAIN_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --tensor-model-parallel-size 1
    --micro-batch-size ${MBS}
    --global-batch-size ${GBS}
    --train-samples 2000000
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --bf16
)

if [ "${USE_MEGATRON_FSDP}" = 1 ]; then
    PRETRAIN_ARGS=(
        "${PRETRAIN_ARGS[@]}"
        --use-megatron-fsdp
        --data-parallel-sharding-strategy optim_grads_params
        --no-gradient-accumulation-fusion
        --ckpt-format fsdp_dtensor
    )
fi

TRAINING_CMD="
export CUDA_DEVICE_MAX_CONNECTIONS=1;
python pretrain_gpt.py ${PRETRAIN_ARGS[@]}"

mkdir -p ${OUTPUT}/logs || {
    echo "cannot make ${OUTPUT}/logs"
    exit 1
}

sbatch <<HERE
#!/bin/bash
#SBATCH --nodes=${NODES}
#SBATCH --ntasks-per-node=8
#SBATCH --time=04:00:00

srun --mpi=pmix -l \
    --container-image=nvcr.io/nvidia/nemo:26.04 \
    bash -x -c "${TRAINING_CMD}" 2>&1 | tee ${OUTPUT}/logs/\${SLURM_JOB_ID}.log
HERE
