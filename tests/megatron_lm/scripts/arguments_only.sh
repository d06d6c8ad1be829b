# Sourced by every job of the project; it starts nothing.
TP=${TP:-2}
DISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 1"
MODEL_ARGS=(
    --num-layers 16
    --hidden-size 2048        # 1.3 B
    --num-attention-heads 16
)
PARALLEL_ARGS="--tensor-model-parallel-size $TP --sequence-parallel --use-distributed-optimizer"
TRAIN_ARGS=("${MODEL_ARGS[@]}" --micro-batch-size 4 --global-batch-size 256 --seq-length 2048)
