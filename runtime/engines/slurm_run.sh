#!/bin/bash
# Written by `graphft slurm`. What is given to sbatch itself counts before these options.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{trainers_per_node}}
#SBATCH --cpus-per-task={{cpus}}
#SBATCH --gpus-per-node={{gpus}}  #? gpus
#SBATCH --time={{time}}  #? time
#SBATCH --partition={{partition}}  #? partition
#SBATCH {{output}}
#SBATCH --open-mode=append
# It is queued again after a preemption, and the loss of the first node; it goes on when another node is lost.
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120

python={{python}}
job={{job}}  #? job
script={{script}}  #? script
cd {{folder}}  #? script

# This script ends when the job is complete (status 0), has failed, or was drained:
#   scancel --signal=TERM --batch JOBID
# Before its time is over (USR1, see above) it drains, and is put into the queue again; then it goes on from the job's
# newest checkpoint.
trap 'again=yes; kill -TERM "$launcher"' USR1
trap 'again=; kill -TERM "$launcher"' TERM
"$python" -m graphft launch --job "$job" --engine slurm{{more}} \  #? job
  --trainers "$(({{trainers_per_node}} * SLURM_JOB_NUM_NODES))" &  #? job
GRAPHFT_ENGINE=slurm "$python" "$script"{{arguments}} &  #? script
launcher=$!
while wait "$launcher"; status=$?; kill -0 "$launcher" 2>/dev/null; do :; done  # a trap ends wait, not the launcher
wait "$launcher"; status=$?
if [ -n "$again" ] && [ "$status" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
