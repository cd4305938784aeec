#!/usr/bin/env bash
# The drafter's quality on one H200, in calls of under ten minutes: docs/quality.md says what came of it.
#
#   benchmarks/h200_queue.sh passes OUT       reuse at equal target passes, a longer run; the second domain's answers
#   benchmarks/h200_queue.sh domains OUT      both domains, many anchors, second seeds
#   benchmarks/h200_queue.sh decode OUT RUN [RUN ...]   real decoding, alone on the GPU
#   benchmarks/h200_queue.sh objectives OUT   objectives, schedules
#
# Needs data/smollm2-135m-instruct (./run.sh fetch-smollm2), data/quality-rows and data/quality-prompts
# (`quality_smollm2.py rows`, `quality_decode.py prompts`: both on a CPU). OUT gets tables and one archive of logs.
# A run of 600 steps takes the GPU 51 s; more than four beside each other gain nothing. REHEARSE=1: the same on a CPU,
# with a few tiny steps.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stage="$1" out="$2"; shift 2
python="${PYTHON:-python3}" target=data/smollm2-135m-instruct chats=runs/quality-chats.jsonl
# Answers in batches of 1,024 take more than 70 GB, which runs beside them do not leave.
train=(--at-once 4 --seconds 400) measure=() answers=(--limit 3072 --batch-size 512 --max-tokens 256)
if [ -n "${REHEARSE:-}" ]; then
  train=(--at-once 1 --steps 2 --cpu) measure=(--cpu) answers=(--limit 200 --batch-size 64 --max-tokens 40)
fi
export OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
"$python" -c "import datasets, deepspeed, fla, hjson, pydantic, transformers" || exit 2
mkdir -p runs "$out"

quality() { "$python" benchmarks/quality_smollm2.py "$@"; }

second_domain() {
  [ -e data/quality-mixed/meta.json ] && return
  "$python" -m recipe regenerate --input data/quality-prompts/chat_train.jsonl --output "$chats" --model "$target" \
    --engine local "${answers[@]}" && quality mix "$chats"
}

runs() {
  quality "${train[@]}" train "$@"
  quality "${measure[@]}" --json "$out/$stage.json" measure
  tar -czf "$out/$stage-logs.tar.gz" runs/quality-configs
}

case "$stage" in
  passes)
    second_domain >"$out/second-domain.log" 2>&1 &
    runs wsd-steps1200 wsd-reuse4 wsd-passes150-reuse2 wsd-passes150
    wait
    tail -n 3 "$out/second-domain.log" ;;
  domains)
    runs wsd-mixed-steps1200 wsd-anchors192 wsd-mixed wsd-seed2 wsd-lr2-seed2
    quality "${measure[@]}" --rows data/quality-chat --json "$out/$stage-chat.json" measure wsd-seed2 wsd-mixed \
      wsd-mixed-steps1200 ;;
  decode)
    "$python" benchmarks/quality_decode.py measure "$@" "${measure[@]}" --seconds 150 --json "$out/decode.json" ;;
  objectives)
    runs wsd-half-soft wsd-anchors96 wsd-ce wsd-ce-gamma4 wsd-ratio2 wsd-ratio7 wsd-alpha3 wsd-alpha7 ;;
  *) echo "passes, domains, decode or objectives" >&2; exit 2 ;;
esac
