# Sourced by the batch scripts beside it, with COMMAND and PRESET set. Everything else is in megarl/launch.
#   sbatch scripts/slurm/grpo_70b.sh key=value ...
#   DRY_RUN=1 bash scripts/slurm/grpo_70b.sh key=value ...     what would run; needs no Slurm
# MEGARL_HOME    checkout, when the job is not submitted from it
# MEGARL_VENV    virtual environment on a shared file system (default: .venv in the checkout)
# MEGARL_ENV     apptainer:IMAGE or pyxis:IMAGE to run inside a container instead
# MEGARL_JOIN_TIMEOUT_S, MEGARL_LOG_DIR, MEGARL_TMPDIR: see megarl/launch/README.md
set -euo pipefail

# sbatch runs a copy of the script from its spool, so the folder of the script is not that of the checkout.
if [[ -z ${MEGARL_HOME:-} ]]; then
  if [[ -n ${SLURM_JOB_ID:-} && -z ${DRY_RUN:-} ]]; then MEGARL_HOME=$SLURM_SUBMIT_DIR
  else MEGARL_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd); fi
fi
cd "$MEGARL_HOME"
[[ -d megarl/launch ]] || { echo "launch failed: $MEGARL_HOME is no checkout of megarl; set MEGARL_HOME" >&2; exit 3; }
export MEGARL_HOME PYTHONUNBUFFERED=1 PYTHONPATH=$MEGARL_HOME${PYTHONPATH:+:$PYTHONPATH}

venv=${MEGARL_VENV:-.venv}
if [[ -x $venv/bin/python ]]; then
  python=$(cd "$venv/bin" && pwd)/python
  PATH=$(dirname "$python"):$PATH
else
  python=$(command -v python3) || { echo "launch failed: no $venv and no python3; set MEGARL_VENV" >&2; exit 3; }
fi
# exec: signals that Slurm sends to the batch step reach the launcher itself.
exec "$python" -m megarl.launch --script "${BASH_SOURCE[1]}" ${DRY_RUN:+--dry-run} "$COMMAND" ${PRESET:+"$PRESET"} "$@"
