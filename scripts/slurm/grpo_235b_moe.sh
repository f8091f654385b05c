#!/usr/bin/env bash
# GRPO on a mixture of experts of 235B: 40 nodes of 8 GPUs. sbatch scripts/slurm/grpo_235b_moe.sh key=value ...
#SBATCH --job-name=grpo_235b_moe
#SBATCH --nodes=40
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
COMMAND=train PRESET=grpo_235b_moe
here=${MEGARL_HOME:-${SLURM_SUBMIT_DIR:-}}
[[ -n $here && -z ${DRY_RUN:-} ]] || here=$(dirname "${BASH_SOURCE[0]}")/../..
source "$here/scripts/slurm/ray_cluster.sh"
