# What the three stages share: parallel layouts, memory, optimizer (seed document 002, sections 6.2 and 8.1).
# Sourced by the stage scripts, which set STAGE and STAGE_ARGS.
#
#   DATA_PATH=... TOKENIZER_PATH=... SAVE=... [PRETRAINED=...] bash stage_1_alignment.sh 4b [more flags of train.py]
#
# DATA_PATH       WebDataset that `energon prepare` has indexed
# TOKENIZER_PATH  Hugging Face tokenizer directory
# SAVE            checkpoints of this stage; a restarted job resumes from there
# PRETRAINED      checkpoints whose weights the stage starts from: those of the stage before
# NODE_RANK, MASTER_ADDR, MASTER_PORT   as torchrun takes them, for more than one node
set -euo pipefail

MODEL=${1:?"give a model size: 4b, 8b or 32b"}
shift
GPUS_PER_NODE=8
case "$MODEL" in
    4b) NODES=1 TP=1 PP=1 GLOBAL_BATCH=8 RECOMPUTE_LAYERS=4 ;;
    8b) NODES=1 TP=2 PP=1 GLOBAL_BATCH=8 RECOMPUTE_LAYERS=8 ;;
    32b) NODES=2 TP=4 PP=2 GLOBAL_BATCH=16 RECOMPUTE_LAYERS=16 ;;
    *) echo "no layout for model size '$MODEL'; give 4b, 8b or 32b" >&2 && exit 2 ;;
esac

LAUNCH_ARGS=(
    --nnodes "$NODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_ARGS=(
    --model-name "llava-ov-1.5-$MODEL"
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
    --bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers "$RECOMPUTE_LAYERS"
)
DATA_ARGS=(
    --data-path "${DATA_PATH:?}"
    --tokenizer-path "${TOKENIZER_PATH:?}"
    --num-workers 16
    --seq-length 32768
    --max-pixels $((1344 * 1344))
)
TRAINING_ARGS=(
    --training-phase sft
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH"
    --min-lr 1.0e-6
    --lr-warmup-fraction 0.002
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.99
    --clip-grad 1.0
)
CHECKPOINT_ARGS=(
    --save "${SAVE:?}"
    --load "$SAVE"
    --save-interval 2000
    --async-save
)
if [ -n "${PRETRAINED:-}" ]; then
    CHECKPOINT_ARGS+=(--pretrained-checkpoint "$PRETRAINED")
fi

# LAUNCHER is for schedulers that start ranks in their own way, and for looking at the command.
${LAUNCHER:-torchrun} "${LAUNCH_ARGS[@]}" -m examples.llava_ov.train \
    "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" \
    --run-name "$STAGE-$MODEL" --metrics-dir "$SAVE/metrics" --log-interval 1 \
    "${STAGE_ARGS[@]}" "$@"
