#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
# Each task of srun is a rank: `sbatch slurm.sh train.py`. After a requeue the script starts anew from its checkpoint.
#SBATCH --requeue
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# Without PMI between ranks, each job has a secret of its own: only its ranks may join.
SAMESTEP_SECRET=$(openssl rand -hex 16)
export SAMESTEP_SECRET
srun --mpi=none python "$@"
