# One long command, two nodes of eight. Gradients and parameters overlap, the optimizer is not distributed.
export CUDA_DEVICE_MAX_CONNECTIONS=1

torchrun --nproc_per_node 8 --nnodes 2 --node_rank ${NODE_RANK:-0} \
    --master_addr $MASTER_ADDR --master_port 29500 \
    pretrain_gpt.py \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 2 --global-batch-size 512 --train-iters 100000 \
    --overlap-grad-reduce --overlap-param-gather \
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --clip-grad 1.0 \
    --data-path '0.7 corpus/web_text_document 0.3 corpus/code_text_document' \
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $'tokenizer.model' \
    --bf16 --use-mcore-models --transformer-impl transformer_engine \
    2>&1 | tee logs/gpt_1b.log
