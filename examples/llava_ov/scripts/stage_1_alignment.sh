#!/usr/bin/env bash
# Stage 1, alignment: the adapter learns to speak the language model's language (LLaVA-558K). Usage: see train.sh.
STAGE=alignment
STAGE_ARGS=(
    --trainable-modules adapter
    --lr 1.0e-4
    --train-iters 2500
)
source "$(dirname "${BASH_SOURCE[0]}")/train.sh"
