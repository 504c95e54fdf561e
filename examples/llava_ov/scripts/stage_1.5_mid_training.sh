#!/usr/bin/env bash
# Stage 1.5, mid-training: everything learns on 85M captioned pictures, packed offline or, with
# `--packing-buffer-size N` at the end of the command, while training. Usage: see train.sh.
STAGE=mid-training
STAGE_ARGS=(
    --trainable-modules all
    --lr 1.0e-5
    --train-iters 20000
)
source "$(dirname "${BASH_SOURCE[0]}")/train.sh"
