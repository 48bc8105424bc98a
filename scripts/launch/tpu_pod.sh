#!/bin/bash
# One run over all hosts of a TPU pod slice, which JAX finds by itself:
#     TPU=my-slice ZONE=us-east5-a RUN_DIR=/mnt/shared/runs/1 scripts/launch/tpu_pod.sh ppo --env CartPole-v1
# RUN_DIR is on a file system that all hosts mount. The same command again goes on from the newest checkpoint.
set -euo pipefail
words=$(printf '%q ' jaxrl-dist train "$@" --run-dir "${RUN_DIR:?}" --resume-or-start)
gcloud compute tpus tpu-vm ssh "${TPU:?}" --zone "${ZONE:?}" --worker=all --command="$words"
