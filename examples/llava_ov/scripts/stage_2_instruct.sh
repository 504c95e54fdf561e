#!/usr/bin/env bash
# Stage 2, instruction tuning: everything learns to follow instructions. Usage: see train.sh.
STAGE=instruct
STAGE_ARGS=(
    --trainable-modules all
    --lr 1.0e-5
    --train-iters 3500
)
source "$(dirname "${BASH_SOURCE[0]}")/train.sh"
