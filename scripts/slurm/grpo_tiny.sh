#!/usr/bin/env bash
# GRPO on a tiny model, CPU only, for trying out a cluster. Needs a warm start with weights, such as the quick start's:
# sbatch scripts/slurm/grpo_tiny.sh model.path=runs/quickstart-seed1/sft/hf key=value ...
#SBATCH --job-name=grpo_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
COMMAND=train PRESET=grpo_tiny
here=${MEGARL_HOME:-${SLURM_SUBMIT_DIR:-}}
[[ -n $here && -z ${DRY_RUN:-} ]] || here=$(dirname "${BASH_SOURCE[0]}")/../..
source "$here/scripts/slurm/ray_cluster.sh"
