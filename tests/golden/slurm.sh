sbatch --parsable --job-name=r-train '--comment={"kftrain": 1, "run": "/shared/kftrain/runs/r", "task": "train", "digest": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd"}' --chdir=/shared/kftrain/runs/r/slurm --output=train-%j.log --open-mode=append --nodes=2 --ntasks-per-node=1 --requeue --signal=B:TERM@120 --partition=gpu --gpus-per-node=8 --time=240 <<'END_5fff6a4bbbfb7db1'
#!/bin/bash
# A job of kftrain, as data for sbatch. TERM: its time is over, or its nodes are wanted; it is requeued after a commit.
# USR1: it is cancelled after a commit. USR2: it is requeued after a commit and held. Only this shell gets these.
asked=''
trap 'asked=requeue' TERM
trap 'asked=cancel' USR1
trap 'asked=hold' USR2
export NCCL_DEBUG=INFO
export NOTE='it'"'"'s "here"; $(reboot)'
# By run and job: jobs of other clusters, too, may share the node. A restart takes another one.
export KFTRAIN_MASTER_PORT=$((20000 + (6262 + SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}"
srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c \
  'export KFTRAIN_NODE_RANK=$SLURM_PROCID KFTRAIN_MASTER_ADDRESS=$SLURM_LAUNCH_NODE_IPADDR; exec "$@"' worker \
  /shared/venv/bin/python -m kftrain worker --task train &
step=$!
code=0
while [ -z "$asked" ] && kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done
if [ -n "$asked" ]; then
  # Again and again: the step may not have begun. INT, as slurmstepd takes TERM for the step's end; to its tasks alone.
  while kill -0 "$step" 2>/dev/null; do
    scancel --quiet --signal=INT "$SLURM_JOB_ID" 2>/dev/null
    sleep 1
  done
  wait "$step"
  code=$?
fi
# A code below 128 is for good. A job that is no longer RUNNING was ended or requeued by Slurm itself.
if [ -n "$asked" ] && [ "$code" -ge 128 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  case $asked in
    requeue) scontrol requeue "$SLURM_JOB_ID" && exit "$code" ;;
    hold) scontrol requeuehold "$SLURM_JOB_ID" && exit "$code" ;;
    cancel) scancel "$SLURM_JOB_ID" && exit "$code" ;;
  esac
fi
umask 077
echo "$code" > train-"$SLURM_JOB_ID".code
exit "$code"
END_5fff6a4bbbfb7db1
