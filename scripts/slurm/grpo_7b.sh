#!/usr/bin/env bash
# GRPO on a 7B model: one node of 8 GPUs. sbatch scripts/slurm/grpo_7b.sh key=value ...
#SBATCH --job-name=grpo_7b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
COMMAND=train PRESET=grpo_7b
here=${MEGARL_HOME:-${SLURM_SUBMIT_DIR:-}}
[[ -n $here && -z ${DRY_RUN:-} ]] || here=$(dirname "${BASH_SOURCE[0]}")/../..
source "$here/scripts/slurm/ray_cluster.sh"
