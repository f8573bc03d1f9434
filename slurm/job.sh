#!/usr/bin/env bash
# What slurm/multinode.sh and slurm/singlenode.sh do, in bash: the nodes need Slurm, a container engine and this.

source "$DRAY_HOME/slurm/engines.sh"
source "$DRAY_HOME/slurm/adopt.sh"
source "$DRAY_HOME/slurm/plan.sh"
source "$DRAY_HOME/slurm/end.sh"

export DRAY_HOME
unset "${!SQUEUE_@}" "${!SINFO_@}" # squeue and sinfo would hide jobs and nodes
readonly -a job__signals=(HUP INT TERM USR1 USR2)
# What each task starts with: ATTEMPT SCRIPT. A node that does not see the run's folder cannot read a script in it, nor write into
# its log: the exit code is all that srun can tell of it, and dray finish reads it in srun's words. It waits for the others, since
# srun ends all tasks with the first that fails. And a user who may write the folder of the runs can put another run in this one's
# place; what is in a folder of this user's, no other user can change. For `exec ./node.sh` bash would take the whole path, which
# may lead to another run by then.
# shellcheck disable=SC2016 # the tasks expand it
readonly job__task='
  if cd -- "$0" 2>/dev/null && [[ -x "$1" ]]; then
    [[ -O . && -O .. && -O "$1" ]] && exec bash "$1"
    echo "dray: $PWD belongs to another user: $HOSTNAME" >&2
    exit 78
  fi
  trap "exit 96" TERM
  sleep 1
  exit 96'

job::die() { # CODE LINE...
  printf 'dray: %s\n' "$2" >&2
  (($# < 3)) || printf '  %s\n' "${@:3}" >&2
  exit "$1"
}

job::given() { # [ARGUMENT...]: all that reaches bash, srun and the facts from outside; a command goes into plan.json alone
  local word
  for word in DRAY_{HOME,IMAGE,SITE,SITES,RUNS} HOME XDG_CONFIG_HOME HF_HOME PWD SLURM_{SUBMIT_DIR,JOB_ID,ARRAY_{JOB,TASK}_ID,JOB_NODELIST,JOB_NUM_NODES,CLUSTER_NAME}; do
    set -- "$word=${!word:-}" "$@"
  done
  for word in "$@"; do
    [[ "$word" != -- ]] || break
    [[ "$word" != *[[:cntrl:]]* ]] || job::die 78 "a value has a control character, such as a line break" \
      "where:  a variable, or a word of the command line" "found:  $(printf '%q' "$word")" "fix:    give another name or value"
  done
}

job::hub() { # HF_HOME, as the library has it where nobody sets it, if this user has such a cache
  local -r usual="${XDG_CACHE_HOME:-${HOME:-}/.cache}/huggingface"
  [[ -n "${HF_HOME:-}" || ! -d "$usual" ]] || export HF_HOME="$usual"
  [[ "${HF_HOME:-}" != /* ]] || mkdir -p -- "$HF_HOME" ||
    job::die 78 "the folder of HF_HOME cannot be made" "where:  $HF_HOME on node $(</proc/sys/kernel/hostname)" "fix:    export HF_HOME=FOLDER"
}

job::runs() { # FOLDER: makes it
  (umask o-w && mkdir -p -- "$1") 2>/dev/null || [[ -d "$1" ]] || job::die 78 "the folder for runs cannot be made" \
    "where:  $1 on node $(</proc/sys/kernel/hostname)" "fix:    set DRAY_RUNS to a folder that you may write and that all nodes share"
}

job::task() { # [ARGUMENT...]: sets `given`; --tasks=FILE becomes the run and the settings of this task of an array, a line of FILE
  given=("$@")
  [[ "${1:-}" == --tasks=* ]] || return 0
  local -r file="${1#*=}" task="${SLURM_ARRAY_TASK_ID:-}"
  local -r valid=$'^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(\t[a-z][^=\t]*=[^\t]*)*$' # no option, and no -- before a command
  local -a words=()
  local line found
  shift
  [[ "$task" =~ ^[1-9][0-9]{0,8}$ ]] || job::die 78 "--tasks works only in a task of a job array" \
    "found:  SLURM_ARRAY_TASK_ID=$task" "fix:    leave --tasks out and name a recipe; dray study submits job arrays"
  found="$(LC_ALL=C stat --format='a %F of user %u, mode %a' -- "$file" 2>/dev/null)" || found="no file"
  # What is in it decides what is started.
  [[ "$file" == /*/*/* && "$found" =~ ^"a regular "(empty )?"file of user $EUID, mode "[0-7]*[0145][0145]$ ]] ||
    job::die 78 "the file with the tasks of this array is not used" "where:  $file" \
      "wanted: the whole path of a file of user $EUID, which nobody else may write" "found:  $found" "fix:    submit the study again"
  line="$(sed -n "${task}p" -- "$file")"
  found="no such line"
  [[ -z "$line" ]] || printf -v found '%q' "${line:0:200}"
  [[ "$line" =~ $valid ]] || job::die 78 "the file with the tasks of this array has no valid line for this task" \
    "where:  $file, line $task" "wanted: a run's name, then its settings, separated by tabs" "found:  $found" \
    "fix:    submit the study again"
  IFS=$'\t' read -ra words <<<"$line"
  given=("--run=${file%/*/*}/${words[0]}")
  while (($#)) && [[ "$1" != -- ]]; do
    given+=("$1")
    shift
  done
  given+=("${words[@]:1}" "$@")
}

job::recipe() { # NAME: the recipe's file, seen from the folder of submission or from the checkout
  local candidate
  for candidate in "$1" "${SLURM_SUBMIT_DIR:-$PWD}/$1" "$DRAY_HOME/$1" "$DRAY_HOME/recipes/$1.toml"; do
    [[ -f "$candidate" ]] && { realpath -- "$candidate"; return; }
  done
  job::die 78 "there is no recipe $1" "where:  $PWD and $DRAY_HOME" \
    "wanted: a recipe file of yours, or one of $(cd "$DRAY_HOME/recipes" && echo *.toml | cut --delimiter=' ' --fields=1-5) ..."
}

job::setting() { # KEY=VALUE: as the planner takes it; a SIF by its whole path
  [[ "$1" != adopted=[!/]*[./]* ]] || set -- "adopted=$(cd -- "${SLURM_SUBMIT_DIR:-$PWD}" && realpath --canonicalize-missing --no-symlinks -- "${1#adopted=}")"
  printf '%s\n' "$1"
}

job::listen() { # COMMAND: which is called with each signal's name
  local signal
  for signal in "${job__signals[@]}"; do
    # shellcheck disable=SC2064 # now, not then
    trap "$1 $signal" "$signal"
  done
}

job::heard() { # SIGNAL: the run is to end, and to say why; at the first USR1 or TERM the ranks may save what they have
  local first="$stopped_by" now length
  printf -v now '%(%s)T' -1
  local -r begin="${SLURM_JOB_START_TIME:-0}" end="${SLURM_JOB_END_TIME:-$now}"
  length=$((end - begin))
  if [[ "$1" == USR1 ]] && ((now - begin < 60 && length <= 300 && now < end - length / 3)); then
    # Slurm tells a job at once whose time limit is nearer than --signal says. What waits ends with this script, too.
    length=$((end - length / 3 - now))
    echo "dray: SIGUSR1 came at the start of a short job: the run is asked to save and end in $length s, when a third of its time is left" >&2
    (timeout "$length" tail --pid=$$ --sleep-interval=0.2 --follow /dev/null || kill -USR1 $$) >/dev/null 2>&1 &
    return 0 # without a number it would be that of what the signal interrupted
  fi
  stopped_at="${stopped_at:-$now}" stopped_by="${stopped_by:-$1}"
  if [[ -z "$first" && ("$1" == USR1 || "$1" == TERM) && -n "$nodes_pid" ]]; then
    echo "$1" >>stop || true
    return 0
  fi
  # scancel and the time limit send TERM to the nodes too, and a program may be saving what it has. All other signals
  # are this script's alone (sbatch --signal=B:USR1, Ctrl-C in an salloc): srun passes on INT, and kills for TERM and HUP.
  [[ "$1" == TERM || -z "$nodes_pid" ]] || kill -INT "$nodes_pid" 2>/dev/null || true
}

job::lease() { # for the ranks, which cannot ask Slurm: whether the job that has the folder of their checkpoints is gone
  local -r holder='"token": "([0-9a-f]{32})".* "job": ([1-9][0-9]{0,17}), "run": "([^"\\]+)", "attempt": ([0-9]{1,9}),'
  local -r lease="${checkpoints:-${attempt%/*}/checkpoints}/lease.json"
  local text answer
  # Another user may have made a pipe of it, which would be read without an end.
  [[ -f "$lease" ]] && text="$(timeout 10 head --bytes=16384 -- "$lease" 2>/dev/null)" || return 0
  [[ "$text" =~ $holder && "${BASH_REMATCH[2]}" != "$SLURM_JOB_ID" ]] || return 0
  local -r token="${BASH_REMATCH[1]}" job="${BASH_REMATCH[2]}" facts="${BASH_REMATCH[3]}/attempt-${BASH_REMATCH[4]}/facts.txt"
  # A number of another cluster's that has the same disk is unknown here too, and Slurm may hide other users' jobs (PrivateData).
  [[ -f "$facts" && -O "$facts" ]] && timeout 10 grep -qxF "cluster=${SLURM_CLUSTER_NAME:-}" -- "$facts" 2>/dev/null || return 0
  if answer="$(timeout 10 squeue --array --noheader --format=%A --jobs="$job" 2>&1)"; then
    # Also while its nodes are still ending its processes. The other tasks of an array that has this number are other jobs.
    [[ "$answer" =~ ^[0-9$'\n']*$ && $'\n'"$answer"$'\n' != *$'\n'"$job"$'\n'* ]] || return 0
  else
    [[ "$answer" == *"Invalid job id specified"* ]] || return 0
  fi
  printf '%s\n' "$token" >"$attempt/ended"
}

job::lost() { # srun waits for the tasks of a dead node until Slurm's own deadline (SlurmdTimeout, 5 minutes by default)
  until compgen -G 'failures/node-*-lost-*.json' >/dev/null; do sleep 1; done
  # The first node writes its record when the others have ended. Where another one has lost the first, ranks may still run.
  compgen -G 'failures/node-0-lost-*.json' >/dev/null || sleep 30
  sleep 5 # for the engines and what they have mounted
  kill -KILL "$nodes_pid" 2>/dev/null
}

job::drained() { # each minute: where Slurm drains a node of the job, the run is to save and leave
  local node reason
  while :; do
    for _ in {1..60}; do sleep 1; done # one long sleep would outlive this
    # --all: also a hidden partition's. A node that the run has lost is not left again.
    while read -r node reason; do
      [[ " ${lost[*]} " != *" $node "* ]] || continue
      echo "dray: Slurm drains $node ($reason): the run is asked to save and leave (drain = leave)" >&2
      kill -USR1 $$
      return
    done < <(timeout 20 sinfo --all --Node --noheader --nodes="$SLURM_JOB_NODELIST" --states=drain --format='%N %E' 2>/dev/null)
  done
}

job::stage() { # Slurm's sbcast copies the image to the nodes' disks, where the plan says so; without it they read the shared file
  [[ -n "$stage" ]] || return 0
  local pid code=0 began=$SECONDS said
  # No signal ends what hangs on a dead disk, nor does the timeout that waits for it: the outer one kills that.
  timeout --kill-after=20 920 timeout --kill-after=10 900 sbcast "$image" "$stage" >logs/sbcast.log 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do # a run that is to end, by a signal or dray stop, does not wait for it
    [[ -z "$stopped_by" && ! -s stop ]] || kill "$pid" 2>/dev/null || true
    sleep 0.2
  done
  wait "$pid" || code=$?
  said="sbcast has copied it to $SLURM_JOB_NUM_NODES nodes in $((SECONDS - began)) s"
  ((code == 0)) || said="nodes without a whole copy read the shared file: sbcast ended with $code: $(tail --lines=1 logs/sbcast.log)"
  echo "image: $said"
  [[ -n "$spares" ]] || return 0
  # sbcast copies to all nodes of a job; no node.sh runs on these, and takes the copy away. The others do not wait for it.
  local -a nodes
  IFS=, read -ra nodes <<<"$spares"
  timeout --kill-after=5 20 srun --overlap --export=ALL --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --cpu-bind=none \
    --nodelist="$spares" rm --force -- "$stage" </dev/null >>logs/sbcast.log 2>&1 &
}

job::start() { # one task on each node; rank 0's lines are this job's output
  local code=0 tail_pid planned_at asked_at
  local -a watches=() options=()
  # Relative paths, since srun would read a % in the run's own as a pattern.
  cd -- "$attempt" || return
  [[ -O . && -O .. ]] || job::die 78 "the run folder belongs to another user, who decides what is in it" "where:  $attempt" \
    "wanted: a folder of user $EUID" "fix:    set DRAY_RUNS to a folder that only you may write"
  read -r planned_at _ </proc/uptime
  job::stage
  read -r asked_at _ </proc/uptime # for the nodes' script: when this one began the attempt, had the plan, and asked for the nodes
  DRAY_ASKED="asked_boot=$(</proc/sys/kernel/random/boot_id) begun=$began_at planned=$planned_at asked=$asked_at"
  export DRAY_ASKED
  [[ ! -f srun.options ]] || mapfile -t options <srun.options
  # --cpu-bind=none: the one task of a node starts all its ranks, and must not be bound to one core.
  # --overlap: inside an salloc another step may hold the nodes, and this one would wait for it without a word.
  # --export=ALL: where sbatch was told to export nothing, srun would take that over, and the engine had no PATH.
  # --disable-status: the first INT is passed on, and no second one kills. It has a process group of its own, where no
  # terminal's Ctrl-C comes too.
  set -m
  srun --overlap --disable-status --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --cpu-bind=none --output=logs/node-%n.log --open-mode=append "${options[@]}" \
    bash -c "$job__task" "$attempt" ./node.sh </dev/null 2>logs/srun.log &
  nodes_pid=$!
  set +m
  [[ -z "$stopped_by" ]] || kill -INT "$nodes_pid" 2>/dev/null || true # heard before there was srun
  echo "logs of all ranks: $attempt/logs; below are rank 0's lines"
  {
    tail --quiet --lines=+1 --follow=name --retry --sleep-interval=0.2 --pid="$nodes_pid" logs/rank-0.log logs/srun.log 2>/dev/null
    [[ -z "$(tail --bytes=1 logs/rank-0.log 2>/dev/null)" ]] || echo # a last line without an end gets it
  } &
  tail_pid=$!
  if [[ " ${options[*]} " == *" --no-kill "* ]]; then
    job::lost &
    watches+=($!)
  fi
  if [[ " ${choices:-} " == *" drain=leave "* ]]; then
    job::drained &
    watches+=($!)
  fi
  while kill -0 "$nodes_pid" 2>/dev/null; do # a signal ends the wait, and not srun
    wait "$nodes_pid" || true
  done
  job::listen 'printf -v late' # what follows is short, and what a signal asks for; the next start of nodes hears it, if there is one
  wait "$nodes_pid" || code=$?
  ((${#watches[@]} == 0)) || kill "${watches[@]}" 2>/dev/null || true
  wait "$tail_pid" || true
  ((code != 0)) || stopped_by="" # the run ended well before it heard
  [[ -z "$stopped_by" ]] || ((code == 75)) || code=$((128 + $(kill -l "$stopped_by")))
  end::finish "$code"
}

job::slurm() { # refuses a job without all that Slurm sets: the run would start on some of its nodes
  local name
  for name in SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES; do
    [[ -n "${!name:-}" ]] || job::die 78 "this is not a complete Slurm job: $name is not set" \
      "wanted: sbatch slurm/multinode.sh RECIPE, or the same with bash in an salloc" "fix:    do not set or unset SLURM_ variables yourself"
  done
  [[ -z "${SLURM_HET_SIZE:-}" ]] || job::die 78 "a heterogeneous job has several node lists, and one part would train alone" \
    "found:  SLURM_HET_SIZE=$SLURM_HET_SIZE" "fix:    submit without --het-group and without : between options"
}

job::main() { # [--tasks=FILE] [--run=FOLDER] [--image=FILE] [--site=SITE] [--gpu-memory=GB] [RECIPE] [key=value ...] [-- COMMAND ...]
  local given_run="" given_image="${DRAY_IMAGE:-}" site="${DRAY_SITE:-}" gpu_memory="" nodes_pid="" stopped_by="" stopped_at="" late="" began_at
  local recipe="" engine image layer="" attempt="" checkpoints="" stage="" spares="" choices="" own_sites="${DRAY_SITES:-${XDG_CONFIG_HOME:-${HOME:-}/.config}/dray/sites}"
  local where="$DRAY_HOME" runs="${DRAY_RUNS:-${SLURM_SUBMIT_DIR:-$PWD}/runs}" failed=-1 code
  local -r here="$PWD"
  local -a given=() settings=() lost=()
  job::task "$@"
  set -- "${given[@]}"
  job::given "$@"
  while [[ "${1:-}" == --?* ]]; do
    case "$1" in
      --run=*) given_run="${1#*=}" ;;
      --image=*) given_image="${1#*=}" ;;
      --site=*) site="${1#*=}" ;;
      --gpu-memory=*) gpu_memory="${1#*=}" ;;
      *) job::die 78 "unknown option $1" "wanted: --run=, --image=, --site= or --gpu-memory=, then RECIPE [key=value ...]" \
        "fix:    put the options for sbatch before the script" ;;
    esac
    shift
  done
  given_run="${given_run%/}" # as a shell completes a folder's name
  job::slurm
  job::hub
  read -r began_at _ </proc/uptime
  job::listen job::heard
  # As in dray submit: a file is a recipe, also one with = in its name.
  if (($# >= 1)) && [[ "$1" != -- ]] && [[ "$1" != *=* || -f "$1" ]]; then
    recipe="$(job::recipe "$1")"
    shift
  fi
  while (($# >= 1)) && [[ "$1" != -- ]]; do
    [[ -n "$recipe" || "$1" == *=* ]] || job::die 78 "there is nothing to run: a program stands in the place of a setting" \
      "wanted: [key=value ...] -- COMMAND ..." "found:  $1" \
      "fix:    put -- before it:$(printf ' %q' sbatch slurm/multinode.sh "${settings[@]}" -- "$@")"
    settings+=("$(job::setting "$1")")
    shift
  done
  local -ra command=("$@")
  # A command runs where it was submitted.
  ((${#command[@]} == 0)) || where="$(realpath -- "${SLURM_SUBMIT_DIR:-$PWD}")"
  [[ "$where" != / ]] || job::die 78 "a command cannot run in /, which would hide the image's own files" "fix:    submit it from its folder"
  [[ "$given_run" != */* ]] || runs="$(dirname -- "$given_run")" # dray submit has made it, or an earlier job; a name alone is in runs
  runs="$(realpath -m -- "$runs")"
  [[ -n "$recipe$given_image" || -z "$given_run" || ${#command[@]} -gt 1 ]] || plan::last
  [[ "$site" != *.toml ]] || site="$(realpath -m -- "$site")"
  engine="$(engine::found)"
  engine::forget
  image="$(plan::guess "${settings[@]}")"
  job::runs "$runs"
  while ((failed < ${#lost[@]})); do # once, and again with a spare node for each one that was lost
    failed=${#lost[@]} code=0
    plan::attempt "${settings[@]}"
    echo "run folder: ${attempt%/*}"
    job::lease || true
    job::start || code=$?
    read -r began_at _ </proc/uptime
    given_run="${attempt%/*}" nodes_pid=""
    cd -- "$here" || return
    job::listen job::heard
    [[ -z "$late" ]] || job::heard "$late"
  done
  return "$code"
}
