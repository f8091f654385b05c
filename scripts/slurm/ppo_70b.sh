#!/usr/bin/env bash
# PPO on a 70B model with a 70B critic: 16 nodes of 8 GPUs. sbatch scripts/slurm/ppo_70b.sh key=value ...
#SBATCH --job-name=ppo_70b
#SBATCH --nodes=16
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
COMMAND=train PRESET=ppo_70b
here=${MEGARL_HOME:-${SLURM_SUBMIT_DIR:-}}
[[ -n $here && -z ${DRY_RUN:-} ]] || here=$(dirname "${BASH_SOURCE[0]}")/../..
source "$here/scripts/slurm/ray_cluster.sh"
