#!/usr/bin/env bash
# Trains on a Cloud TPU slice, whose hosts discover each other. Run in the folder of the repository:
#   scripts/launch/cloud_tpu.sh create     requests the slice and waits until it is active
#   scripts/launch/cloud_tpu.sh install    copies the last commit to all hosts and installs it
#   scripts/launch/cloud_tpu.sh train      starts or resumes training on all hosts
#   scripts/launch/cloud_tpu.sh log        follows the log of the first host
#   scripts/launch/cloud_tpu.sh delete     deletes the slice
# The run folder and the data are on a file system that all hosts mount (Filestore), because all hosts write parts of a
# checkpoint, which is renamed when complete.
set -euo pipefail

if [[ ! "${1:-}" =~ ^(create|install|train|log|delete)$ ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi
NAME="${NAME:-tformer}"
PROJECT="${PROJECT:?the Google Cloud project}"
ZONE="${ZONE:-us-east5-b}"
ACCELERATOR="${ACCELERATOR:-v6e-16}"
CHIPS="${ACCELERATOR##*-}" # of v6e and v5litepod; other names count cores, at least the chips
RUNTIME="${RUNTIME:-v2-alpha-tpuv6e}"
FILES="${FILES:?address and share of a Filestore, such as 10.0.0.2:/share}"
CONFIG="${CONFIG:-configs/translate_cldr.py}"
PLACE=(--project="$PROJECT" --zone="$ZONE")

on() { # on WORKER COMMAND
  gcloud compute tpus tpu-vm ssh "$NAME" "${PLACE[@]}" --worker="$1" --command="$2"
}

case "${1:-}" in
  create)
    gcloud compute tpus queued-resources create "$NAME" "${PLACE[@]}" --node-id="$NAME" \
      --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME"
    until state=$(gcloud compute tpus queued-resources describe "$NAME" "${PLACE[@]}" --format="value(state.state)") &&
      [[ "$state" == ACTIVE ]]; do
      [[ "$state" != FAILED && "$state" != SUSPENDED ]] || exit 1
      echo "$state"
      sleep 60
    done
    ;;
  install)
    git archive --output=/tmp/tformer_jax.tar.gz HEAD
    gcloud compute tpus tpu-vm scp /tmp/tformer_jax.tar.gz "$NAME:" "${PLACE[@]}" --worker=all
    on all "set -e
      sudo apt-get install -y nfs-common
      sudo mkdir -p /mnt/shared
      mountpoint -q /mnt/shared || sudo mount $FILES /mnt/shared
      sudo chmod a+w /mnt/shared
      mkdir -p tformer_jax
      tar -C tformer_jax -xzf tformer_jax.tar.gz
      cd tformer_jax
      pip install --user uv
      ~/.local/bin/uv venv --allow-existing --python 3.12
      ~/.local/bin/uv pip install -e '.[tpu]'"
    ;;
  train)
    on all "cd tformer_jax
      source .venv/bin/activate
      export LIBTPU_INIT_ARGS=\"\$(python scripts/xla_flags.py tpu fsdp)\"
      nohup python scripts/train.py --config $CONFIG --resume \
        --run /mnt/shared/runs/$NAME --data /mnt/shared/data \
        --config.parallel.preset=fsdp --config.data.batch_multiple=$CHIPS \
        --config.data.batch_tokens=8192 --config.model.dtype=bfloat16 \
        >> train.log 2>&1 < /dev/null &"
    ;;
  log)
    on 0 "tail -n 100 -f tformer_jax/train.log"
    ;;
  delete)
    gcloud compute tpus queued-resources delete "$NAME" "${PLACE[@]}" --force
    ;;
esac
