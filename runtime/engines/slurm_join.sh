#!/bin/bash
# Written by `graphft slurm --join`. What is given to sbatch itself counts before these options.
#SBATCH --job-name={{name}}-join
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{trainers_per_node}}
#SBATCH --cpus-per-task={{cpus}}
#SBATCH --gpus-per-node={{gpus}}  #? gpus
#SBATCH --time={{time}}  #? time
#SBATCH --partition={{partition}}  #? partition
#SBATCH {{output}}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=TERM@120

# Trainers for a job that runs. Each leaves when it has ended its step, on SIGTERM, and when the job is complete. One
# that dies is started again; after ten times in a row, or when the job is not found for some minutes, it is given up.
export python={{python}} job={{job}} etcd={{etcd}}

trainer() {
  trap : TERM
  for ((tries = 0; tries < 10; tries++)); do
    begun=$SECONDS
    "$python" -m graphft start trainer --job "$job" ${etcd:+--etcd "$etcd"}
    status=$?
    case $status in 0 | 2) return "$status" ;; esac
    if [ $((SECONDS - begun)) -gt 600 ]; then tries=0; fi
    sleep 5
  done
  return "$status"
}
export -f trainer
export PYTHONHASHSEED=0
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c trainer
