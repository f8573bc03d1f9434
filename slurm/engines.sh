#!/usr/bin/env bash
# How a job starts a program in an image, by each engine: what job.sh plans and finishes a run with. The nodes of the run
# are started by node.sh, which the planner writes. job.sh has set `engine`, `image`, `folders`, `where` and what the job was given.
# shellcheck disable=SC2154

source "$DRAY_HOME/slurm/engine_table.sh"

readonly -a engine__variants=(cpu cuda cuda12 rocm rocm6)
readonly engine__srun=(srun --export=ALL --nodes=1 --ntasks=1)

engine::forget() { # what an engine takes from the environment by itself, and no plan would show
  local name
  for name in {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT}; do
    [[ -z "${!name:-}" ]] || echo "dray: warning: $name is not used: add paths to the container with [[binds]] in a site file" >&2
  done
  unset "${!APPTAINERENV_@}" "${!SINGULARITYENV_@}" {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAINLIBS}
}

engine::found() { # what is on this node; the planner says so where the site has another
  local help
  ! command -v apptainer >/dev/null || { echo apptainer; return; }
  ! command -v singularity >/dev/null || { echo singularity; return; }
  # Plugins of Slurm, which add options to srun. CSCS's own has Pyxis's too.
  help="$(srun --help 2>/dev/null)" || true
  [[ "$help" != *--environment* ]] || { echo edf; return; }
  [[ "$help" != *--container-image* ]] || { echo pyxis; return; }
  command -v podman-hpc >/dev/null || job::die 69 "there is no container engine on node $(</proc/sys/kernel/hostname)" "where:  PATH=$PATH" \
    "wanted: apptainer, singularity or podman-hpc, or an srun with --environment or --container-image" \
    "fix:    load the site's module before sbatch, or in your ~/.bash_profile"
  echo podman-hpc
}

engine::kind() { # FILE
  case "$(head --bytes=64 -- "$1" | tr --delete '\0')" in
    hsqs*) echo squashfs ;;
    *SIF_MAGIC*) echo sif ;;
    *) echo unknown ;;
  esac
}

engine::image() { # VARIANT|NAME|FILE: its file for this engine, or the one that the user named
  local -r suffix="${engine__suffix["$engine"]}" formats="${engine__formats["$engine"]}"
  local -r image="${given_image:-$DRAY_HOME/build/dray-$1.$suffix}" fix="make image-$1; or set DRAY_IMAGE to an image that dray has built (docs/reference/engines.md)"
  local kind
  [[ -n "$formats" ]] || { echo "${given_image:-${engine__store["$engine"]}dray:$1}"; return; }
  if [[ -z "$given_image" && " ${engine__variants[*]} " != *" $1 "* ]]; then
    adopt::image "$1"
    return
  fi
  [[ -f "$image" ]] || job::die 78 "the image does not exist" "wanted: $image (the recipe's image is $1)" "found:  no file" \
    "fix:    $fix" "        or slurm/dray image adopt FILE; a job with adopted=FILE does it too"
  kind="$(engine::kind "$image")"
  # Apptainer and SingularityCE say themselves what is wrong with a file.
  [[ "$suffix" == sif || " $formats " == *" $kind "* ]] || job::die 78 "$engine does not start an image of this kind" \
    "where:  $image" "wanted: ${formats// / or }" "found:  $kind" "fix:    $fix"
  if adopt::is "$image"; then # it is known by its folder
    adopt::unchanged "$image"
    realpath --no-symlinks -- "$image"
  else
    realpath -- "$image"
  fi
}

engine::inside() { # COMMAND...: in the image, which sees `folders`, the user's site files and HF_HOME; it stands in `where`
  local folder text pairs="" edf="" code=0
  local -a mounted mounts argv
  # What dray reads inside. Apptainer passes it on by these prefixes alone.
  local -x DRAY_SITES="$own_sites" APPTAINERENV_DRAY_SITES="$own_sites" SINGULARITYENV_DRAY_SITES="$own_sites"
  local -x APPTAINERENV_DRAY_HOME="$DRAY_HOME" SINGULARITYENV_DRAY_HOME="$DRAY_HOME"
  if adopt::is "$image"; then
    text="$(adopt::value "$image" pythonpath)"
    local -x APPTAINERENV_PYTHONPATH="${image%/*}:$DRAY_HOME/src${text:+:$text}"
    local -x SINGULARITYENV_PYTHONPATH="$APPTAINERENV_PYTHONPATH"
  fi
  for folder in "$own_sites" "${HF_HOME:-}"; do
    [[ "$folder" != /* || ! -d "$folder" ]] || folders+=("$folder")
  done
  engine::mounts
  [[ "$engine" != edf ]] || engine::edf
  engine::argv
  "${argv[@]}" "$@" || code=$?
  [[ -z "$edf" ]] || rm --force -- "$edf"
  return "$code"
}

engine::mounts() { # sets `mounts`, each folder once, as CSV, so that commas and quotes survive; for srun `mounted` and `pairs`
  local -r never="${engine__never["$engine"]}"
  local folder quoted
  local -A seen=() # Apptainer warns of a mount that it has already
  mounted=() mounts=()
  for folder in "${folders[@]}"; do
    [[ -z "${seen["$folder"]:-}" ]] || continue
    seen["$folder"]=1
    [[ -z "$never" || "$folder" != *["$never"]* ]] || job::die 78 "$engine cannot mount a path with one of $never in it" \
      "found:  $folder" "fix:    name another folder"
    mounted+=("$folder:$folder")
    quoted="${folder//\"/\"\"}"
    mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"")
    pairs+="${pairs:+,}$folder:$folder"
  done
}

engine::edf() { # sets `edf`: a file of TOML in which srun reads what the container is
  edf="$(mktemp --suffix=.toml -- "$runs/.edf-XXXXXX")" || job::die 69 "the container's EDF cannot be written" \
    "where:  $runs" "fix:    free space on that disk"
  {
    printf "image = '''%s'''\nworkdir = '''%s'''\nentrypoint = false\nmounts = [\n" "$image" "$where"
    printf "  '''%s''',\n" "${mounted[@]}"
    printf ']\n'
  } >"$edf"
}
