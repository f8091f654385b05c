#!/usr/bin/env bash
# A language model learns arithmetic on this machine's CPU: a tiny model from scratch, a supervised warm start, then GRPO
# with Megatron-Core training it and vLLM sampling from it, two-way tensor parallel each.
#   scripts/quickstart.sh [SEED] [--seed N] [--run-dir DIR] [key=value ...]      key=value overrides the preset grpo_tiny
# MEGARL_SEED sets the seed too. A second call with the same directory goes on where the first stopped.
# Last line: accuracy A -> B in S s, run DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
begin=$SECONDS

seed=${MEGARL_SEED:-1} run_dir='' overrides=()
while (($#)); do
  case $1 in
  --seed) seed=${2:?--seed needs a number}; shift ;;
  --run-dir) run_dir=${2:?--run-dir needs a folder}; shift ;;
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *=*) overrides+=("$1") ;;
  *[!0-9]* | '') echo "quickstart: '$1' is no seed, no option and no key=value" >&2; exit 2 ;;
  *) seed=$1 ;;
  esac
  shift
done
run_dir=${run_dir:-runs/quickstart-seed$seed}

stage='' child=''
finish() {
  local rc=$?
  trap - EXIT INT TERM
  if [[ -n $child ]] && kill -0 "$child" 2>/dev/null; then
    # The stage has its own process group: it ends with everything it started.
    kill -TERM -- "-$child" 2>/dev/null || true
    for _ in {1..100}; do kill -0 -- "-$child" 2>/dev/null || break; sleep 0.1; done
    kill -KILL -- "-$child" 2>/dev/null || true
  fi
  if ((rc != 0)); then
    echo "quickstart stopped in: ${stage:-environment} (exit code $rc). The same command resumes here." >&2
  fi
  exit "$rc"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

run() { # name of the stage, command
  stage=$1
  shift
  echo "== $stage"
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  wait "$child"
  child=''
}

stage=environment
scripts/setup_env.sh run
export PATH=$PWD/${MEGARL_VENV:-.venv}/bin:$PATH
# A fresh environment holds no bytecode: it is compiled once, not by each of the many processes.
unset PYTHONDONTWRITEBYTECODE
mkdir -p "$run_dir"

model=$run_dir/model sft=$run_dir/sft grpo=$run_dir/grpo
[[ -s $model/config.json && -s $model/tokenizer.json ]] ||
  run "a tiny model and its tokenizer" python -m megarl.models.tiny "$model"
[[ -s $run_dir/chats.jsonl ]] ||
  run "chats to imitate" python scripts/arithmetic_chats.py "$run_dir/chats.jsonl"
[[ -s $sft/summary.json && -s $sft/hf/config.json ]] ||
  run "supervised warm start" megarl sft sft_tiny model.path="$model" data.train.0.path="$run_dir/chats.jsonl" run.dir="$sft" run.seed="$seed"
[[ -s $grpo/summary.json ]] ||
  run "GRPO" megarl train grpo_tiny model.path="$sft/hf" run.dir="$grpo" run.seed="$seed" "${overrides[@]}"

stage=summary
python - "$grpo" "$((SECONDS - begin))" <<'PYTHON'
import json, sys
from pathlib import Path

run, seconds = Path(sys.argv[1]), sys.argv[2]
summary = json.loads((run / "summary.json").read_text())
print(f"accuracy {summary['accuracy_start']:.3f} -> {summary['accuracy_end']:.3f} in {seconds} s, run {run}")
PYTHON
