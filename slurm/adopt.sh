#!/usr/bin/env bash
# Sourced by slurm/job.sh: an image that somebody else made, used where it is. Its folder has image.sif, a link to the file or a
# copy; source, a link to the file; image.json, what is known of both; and the packages that the image lacks. All this
# src/dray/images/adopted_folder.py makes, started in the image. `dray image adopt` makes the same folder.
# It uses what job::main has set: engine, runs.
# shellcheck disable=SC2154

readonly adopt__facts='owner %u, inode %i, %s bytes, changed %.9Y' # as src/dray/images/store.py

adopt::is() { # IMAGE: whether it was adopted
  [[ "$1" == */image.sif && -f "${1%/*}/image.json" ]]
}

adopt::value() { # IMAGE KEY: of its image.json
  sed -n "s/^ \"$2\": \"\\(.*\\)\",*\$/\\1/p" "${1%/*}/image.json"
}

adopt::names() { # of the images that were adopted, a line each
  local image
  for image in {"$DRAY_HOME/build","$runs/.adopted"}/dray-*/image.sif; do
    ! adopt::is "$image" || adopt::value "$image" name
  done
}

adopt::find() { # NAME|FILE: the image that was adopted under this name, or from this file
  local image
  for image in {"$DRAY_HOME/build","$runs/.adopted"}/dray-*/image.sif; do
    if adopt::is "$image" && [[ "$image" == */"dray-$1/image.sif" || "$(readlink -- "${image%/*}/source")" == "$1" ]]; then
      printf '%s\n' "$image"
      return
    fi
  done
  return 1
}

adopt::image() { # NAME|FILE: its image, adopted on the way where it is a file; what was adopted must be unchanged
  local image
  if image="$(adopt::find "$1")"; then
    adopt::unchanged "$image"
    echo "$image"
  elif [[ "$1" == /* ]]; then
    adopt::make "$1"
  else
    job::die 78 "there is no adopted image $1" "wanted: adopted=/WHOLE/PATH/OF/A.sif, or one of: $(adopt::names | paste --serial --delimiters=' ')" \
      "fix:    slurm/dray image adopt FILE.sif --name $1"
  fi
}

adopt::unchanged() { # IMAGE
  local file="${1%/*}/source" named wanted found
  [[ -L "$file" ]] || file="$1"
  named="$(readlink -- "$file" || echo "$file")"
  wanted="$(adopt::value "$1" file)"
  found="$(stat --dereference --format="$adopt__facts" -- "$file" 2>&1)" || true
  [[ "$found" == "$wanted" ]] || job::die 78 "the image was changed since it was adopted" "where:  $named on node $(</proc/sys/kernel/hostname)" \
    "wanted: $wanted" "found:  $found" \
    "fix:    $(printf '%q ' "$DRAY_HOME/slurm/dray" image adopt "$(adopt::value "$1" source)" --name "$(adopt::value "$1" name)")--force"
}

adopt::make() { # FILE [--name NAME] [--force]: prints the image; its own Python makes the folder
  local -r file="$1"
  local facts folder_mode image name code=0
  local -a folders=("$DRAY_HOME" "$file") mounts read_only
  shift
  [[ "$engine" == apptainer || "$engine" == singularity ]] || job::die 78 "$engine does not start an adopted image, which is a SIF" \
    "found:  adopted=$file" "fix:    use a node with apptainer or singularity, or leave it out: adopted="
  [[ -f "$file" && -r "$file" ]] || job::die 78 "the image does not exist, or cannot be read" "where:  $file on node $(</proc/sys/kernel/hostname)" \
    "wanted: a SIF" "found:  $(LC_ALL=C stat --dereference --format='a %F of user %u, mode %a' -- "$file" 2>/dev/null || echo no file)" \
    "fix:    correct the path: adopted=/WHOLE/PATH/OF/A.sif"
  [[ "$(engine::kind "$file")" == sif ]] || job::die 78 "the image is no SIF" "where:  $file" \
    "fix:    of an archive or a folder of OCI make one first: $engine build x.sif docker-archive:$(printf %q "$file")"
  # Where pip looks is the user's to say. An address may have a password, and all users of this machine see a command line.
  name="${XDG_CONFIG_HOME:-${HOME:-}/.config}/pip/pip.conf"
  [[ -n "${PIP_CONFIG_FILE:-}" || ! -f "$name" ]] || local PIP_CONFIG_FILE="$name"
  for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY PIP_{INDEX_URL,EXTRA_INDEX_URL,FIND_LINKS,CERT,CONFIG_FILE,TRUSTED_HOST} \
    SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
    [[ -z "${!name:-}" ]] || local -x "APPTAINERENV_$name=${!name}" "SINGULARITYENV_$name=${!name}"
    [[ "${!name:-}" != /* || ! -f "${!name}" && ! -d "${!name}" ]] || folders+=("${!name}") # a device would have nodev
  done
  facts="$(stat --dereference --format="$adopt__facts" -- "$file")"
  folder_mode="$(stat --format=%a -- "$(dirname -- "$(realpath -- "$file")")")"
  engine::mounts
  # The image may be anybody's: it writes where its folder will be, which is beside the runs if the checkout cannot be written.
  read_only=("${mounts[@]/%/,ro}") folders=()
  (umask 022 && mkdir -p -- "$DRAY_HOME/build") 2>/dev/null || true
  [[ -d "$DRAY_HOME/build" && -w "$DRAY_HOME/build" ]] || job::runs "$runs/.adopted"
  [[ ! -d "$DRAY_HOME/build" ]] || folders+=("$DRAY_HOME/build")
  [[ ! -d "$runs/.adopted" ]] || folders+=("$runs/.adopted")
  engine::mounts
  image="$("$engine" --quiet exec --cleanenv --no-eval --no-mount=home,cwd --contain "${read_only[@]}" "${mounts[@]}" --pwd=/ "$file" env PYTHONDONTWRITEBYTECODE=1 \
    python3 -c 'import sys; sys.path.insert(0, sys.argv[1] + "/src"); from dray.images import adopted_folder; adopted_folder.main()' \
    "$DRAY_HOME" "$runs" "$file" "$facts" "$folder_mode" "$@")" || code=$?
  [[ "$code" =~ ^(0|2|69|70|75|78|129|130|143)$ ]] ||
    job::die 69 "the image does not start, or has no python3 of version 3.11 or newer" "where:  $file" \
      "found:  exit code $code; the lines above say more" "fix:    $engine exec $(printf %q "$file") python3 --version"
  ((code == 0)) || exit $((code == 2 ? 78 : code)) # it has said why
  image="${image##*$'\n'}" # an image may greet
  adopt::unchanged "$image" # while it was read
  echo "$image"
}

adopt::main() { # FILE [--name NAME] [--force]: at a login node
  local -r runs="$(realpath -m -- "${DRAY_RUNS:-runs}")"
  local engine
  job::given "$@"
  [[ -f "${1:-}" ]] || job::die 78 "slurm/dray image adopt needs a file" "wanted: FILE [--name NAME] [--force]" "found:  no file ${1:-}" \
    "fix:    slurm/dray image adopt /WHOLE/PATH/OF/A.sif; of docker://NAME: apptainer pull x.sif docker://NAME"
  engine="$(engine::found)"
  engine::forget
  adopt::make "$(realpath --no-symlinks -- "$1")" "${@:2}"
}
