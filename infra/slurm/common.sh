# shellcheck shell=bash
# Sourced by learner.sbatch and syncer.sbatch: the job's name, and `attend`, which brings a job back until its work is done.

# The same however often the job is queued again.
name=$SLURM_JOB_NAME${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}

# The id of an array's last task is that of the whole array.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

# Who ends by itself within so many seconds of its start has a mistake in it, and is not started again.
SETTLED_S=${SETTLED_S:-60}

running() {
    [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]
}

asked=
leave() {
    asked=1
    # To the job's steps; srun itself, told to end, would kill them. Where the job is completing Slurm has told them.
    if running; then scancel --signal=TERM "$job" || true; fi
}

# Run a command as the job's step. Told that the time limit is near it leaves in order, and the job is queued again, as
# after a failure. It ends with exit code 0 (all steps done), 3 (and never merged), when it is cancelled, or at once.
attend() {
    local step code
    trap leave TERM
    srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$@" &
    step=$!
    until
        code=0
        wait "$step" || code=$?
        ! kill -0 "$step" 2>/dev/null
    do
        : # a signal ended the waiting, not the step
    done
    echo "$name: ended with $code after $SECONDS s${asked:+, told to}, restart ${SLURM_RESTART_COUNT:-0}"
    if [ -z "$asked" ] && { [ "$code" -eq 0 ] || [ "$code" -eq 3 ] || [ "$SECONDS" -lt "$SETTLED_S" ]; }; then
        exit "$code"
    fi
    # Cancelled, or preempted and queued again by Slurm: it is completing by now.
    running || exit "$code"
    scontrol requeue "$job"
}
