#!/usr/bin/env bash
# How a job starts a program in an image, by each engine: what lib.sh plans and finishes a run with. The nodes of the run
# are started by node.sh, which the planner writes. lib.sh has set `engine`, `image`, `folders`, `where` and what the job was given.
# shellcheck disable=SC2154

readonly engine__pull="push dray's image to a registry; shifterimg pull docker:NAME:TAG; export DRAY_IMAGE=docker:NAME:TAG"
readonly -a engine__variants=(cpu cuda cuda12 rocm rocm6)
readonly engine__srun=(srun --export=ALL --nodes=1 --ntasks=1)

engine::found() { # what is on this node; the planner says so where the site has another
  local found help
  for found in apptainer singularity; do
    command -v "$found" >/dev/null && { echo "$found"; return; }
  done
  # Plugins of Slurm, which add options to srun. CSCS's own has Pyxis's too.
  help="$(srun --help 2>/dev/null)" || true
  [[ "$help" != *--environment* ]] || { echo edf; return; }
  [[ "$help" != *--container-image* ]] || { echo pyxis; return; }
  ! command -v podman-hpc >/dev/null || { echo podman-hpc; return; }
  ! command -v shifter >/dev/null || { echo shifter; return; }
  ! command -v ch-run >/dev/null || { echo charliecloud; return; }
  lib::die 69 "there is no container engine on node $(</proc/sys/kernel/hostname)" "where:  PATH=$PATH" \
    "wanted: apptainer, singularity, podman-hpc, shifter or ch-run, or an srun with --environment or --container-image" \
    "fix:    load the site's module before sbatch, or in your ~/.bash_profile"
}

engine::traits() { # sets `formats`, the kinds of image it starts, `suffix` of the usual one, and `never`, which no path of a mount has
  suffix=sqsh
  case "$engine" in
    pyxis) formats=squashfs never=',:' ;;
    edf) formats=squashfs never=',:$' ;;
    charliecloud) formats='squashfs folder' never=: ;;
    podman-hpc | shifter) formats='' never='' ;; # a name in its store
    *) formats='sif squashfs' never='' suffix=sif ;;
  esac
}

engine::kind() { # FILE
  [[ ! -d "$1" ]] || { echo folder; return; }
  case "$(head --bytes=64 -- "$1" | tr --delete '\0')" in
    hsqs*) echo squashfs ;;
    *SIF_MAGIC*) echo sif ;;
    *) echo unknown ;;
  esac
}

engine::image() { # VARIANT|NAME|FILE: its file for this engine, or the one that the user named
  local formats suffix never kind fix="make image-$1, or set DRAY_IMAGE to an image that dray has built"
  engine::traits
  if [[ "$engine" == shifter ]]; then # it drops other characters, and looks for what is left
    [[ "$given_image" =~ ^(docker|custom|id):[A-Za-z0-9_.:+@/-]+$ ]] || lib::die 78 "shifter starts images of its gateway" \
      "wanted: DRAY_IMAGE=docker:NAME:TAG, or custom: or id:" "found:  DRAY_IMAGE=$given_image" "fix:    $engine__pull"
    echo "$given_image"
    return
  fi
  [[ -n "$formats" ]] || { echo "${given_image:-localhost/dray:$1}"; return; }
  [[ "$suffix" == sif ]] || fix="make one of dray's image (docs/reference/engines.md), or set DRAY_IMAGE to an image that dray has built"
  if [[ -z "$given_image" && " ${engine__variants[*]} " != *" $1 "* ]]; then
    adopt::image "$1"
    return
  fi
  local -r image="${given_image:-$DRAY_HOME/build/dray-$1.$suffix}"
  [[ -f "$image" || -d "$image" && "$formats" == *folder* ]] || lib::die 78 "the image does not exist" \
    "wanted: $image (the recipe's image is $1)" "fix:    $fix"
  kind="$(engine::kind "$image")"
  # Apptainer and SingularityCE say themselves what is wrong with a file.
  [[ "$suffix" == sif || " $formats " == *" $kind "* ]] || lib::die 78 "$engine does not start an image of this kind" \
    "where:  $image" "wanted: ${formats// / or }" "found:  $kind" "fix:    $fix"
  if adopt::is "$image"; then # it is known by its folder
    adopt::unchanged "$image"
    realpath --no-symlinks -- "$image"
  else
    realpath -- "$image"
  fi
}

engine::inside() { # COMMAND...: in the image, which sees `folders`; it stands in `where`
  local formats suffix never folder
  engine::traits
  for folder in "${folders[@]}" "$image"; do
    [[ -z "$never" || "$folder" != *["$never"]* ]] || lib::die 78 "$engine cannot mount a path with one of $never in it" \
      "found:  $folder" "fix:    name another folder"
  done
  case "$engine" in
    pyxis) engine::pyxis "$@" ;;
    edf) engine::edf "$@" ;;
    charliecloud) engine::charliecloud "$@" ;;
    podman-hpc) engine::podman_hpc "$@" ;;
    shifter) engine::shifter "$@" ;;
    *) engine::apptainer "$@" ;;
  esac
}

engine::mounts() { # sets `mounts`: options, as CSV, so that commas and quotes in a path survive
  local folder quoted
  local -A seen=() # Apptainer warns of a mount that it has already
  mounts=()
  for folder in "${folders[@]}"; do
    [[ -z "${seen["$folder"]:-}" ]] || continue
    seen["$folder"]=1
    quoted="${folder//\"/\"\"}"
    mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"")
  done
}

engine::apptainer() { # COMMAND...
  local -a mounts
  local python_path
  engine::mounts
  if adopt::is "$image"; then
    python_path="$(adopt::value "$image" pythonpath)"
    python_path="${image%/*}:$DRAY_HOME/src${python_path:+:$python_path}"
    local -x APPTAINERENV_PYTHONPATH="$python_path" SINGULARITYENV_PYTHONPATH="$python_path"
  fi
  APPTAINERENV_DRAY_HOME="$DRAY_HOME" SINGULARITYENV_DRAY_HOME="$DRAY_HOME" \
    APPTAINERENV_DRAY_SITES="$own_sites" SINGULARITYENV_DRAY_SITES="$own_sites" \
    "$engine" --quiet exec --cleanenv --no-eval --no-mount=home,cwd "${mounts[@]}" --pwd "$where" "$image" "$@"
}

engine::pyxis() { # COMMAND...
  local folder joined=""
  for folder in "${folders[@]}"; do
    joined+="${joined:+,}$folder:$folder"
  done
  DRAY_HOME="$DRAY_HOME" DRAY_SITES="$own_sites" "${engine__srun[@]}" --container-image="$image" --no-container-mount-home \
    --container-mounts="$joined" --container-workdir="$where" "$@"
}

engine::edf() { # COMMAND...: what the container is, srun reads from a file
  local edf folder code=0
  edf="$(mktemp --suffix=.toml -- "$runs/.edf-XXXXXX")" || lib::die 69 "the container's EDF cannot be written" \
    "where:  $runs" "fix:    free space on that disk"
  {
    printf 'image = %s\nworkdir = %s\nentrypoint = false\nmounts = [\n' "$(engine::text "$image")" "$(engine::text "$where")"
    for folder in "${folders[@]}"; do
      printf '  %s,\n' "$(engine::text "$folder:$folder")"
    done
    printf ']\n'
  } >"$edf" || code=$?
  ((code != 0)) ||
    DRAY_HOME="$DRAY_HOME" DRAY_SITES="$own_sites" "${engine__srun[@]}" --environment="$edf" "$@" || code=$?
  rm --force -- "$edf"
  return "$code"
}

engine::charliecloud() { # COMMAND...: as in src/dray/render/bash/charliecloud.sh
  local -a words=(--unset-env='*' --env-no-expand "--set-env=DRAY_HOME=$DRAY_HOME" "--set-env=DRAY_SITES=$own_sites")
  local folder
  export USER="${USER:-$(id --user --name)}"
  words+=("--set-env=$(grep '^PATH=' "$DRAY_HOME/containers/environment")")
  [[ "$(ch-run --help 2>&1)" != *--write-fake* ]] || words+=(--write-fake)
  for folder in "${folders[@]}"; do
    words+=("--bind=$folder:$folder")
  done
  env --unset=TMPDIR ch-run "${words[@]}" --cd="$where" "$image" -- "$@"
}

engine::podman_hpc() { # COMMAND...
  local -a mounts words=(--rm --interactive --network=host "--user=$UID:$(id --group)")
  engine::mounts
  ((UID == 0)) || words+=(--userns=keep-id)
  podman-hpc run "${words[@]}" --env=DRAY_HOME="$DRAY_HOME" --env=DRAY_SITES="$own_sites" "${mounts[@]}" \
    --workdir="$where" "$image" "$@"
}

engine::shifter() { # COMMAND...: as in src/dray/engines/shifter.py
  shifter --image="$image" --module=none --clearenv --env=DRAY_HOME="$DRAY_HOME" --env=DRAY_SITES="$own_sites" \
    --workdir="$where" -- /bin/sh -c "$(<"$DRAY_HOME/src/dray/engines/visible.sh")" sh "${folders[@]}" -- "$@"
}

engine::text() { # TEXT: as a string of TOML
  local -r text="${1//\\/\\\\}"
  printf '"%s"' "${text//\"/\\\"}"
}
