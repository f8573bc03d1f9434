#!/usr/bin/env bash
# Sourced by slurm/lib.sh: an image that somebody else made, used where it is. Its folder has image.sif, a link to the file or a
# copy; source, a link to the file; image.json, what is known of both; and the packages that the image lacks, which
# src/dray/images/adopted_folder.py puts there, started in the image. `dray image adopt` makes the same folder.
# It uses what lib::main has set: engine, runs.
# shellcheck disable=SC2154

readonly adopt__facts='owner %u, inode %i, %s bytes, changed %.9Y' # as src/dray/images/store.py

adopt::is() { # IMAGE: whether it was adopted
  [[ "$1" == */image.sif && -f "${1%/*}/image.json" ]]
}

adopt::value() { # IMAGE KEY: of its image.json
  sed -n "s/^ \"$2\": \"\\(.*\\)\",*\$/\\1/p" "${1%/*}/image.json"
}

adopt::all() { # the images that were adopted, a line each
  local image
  for image in {"$DRAY_HOME/build","$runs/.adopted"}/dray-*/image.sif; do
    ! adopt::is "$image" || printf '%s\n' "$image"
  done
}

adopt::names() { # their names
  adopt::all | sed 's|.*/dray-\(.*\)/image.sif$|\1|'
}

adopt::find() { # NAME|FILE: the image that was adopted under this name, or from this file
  local image
  while IFS= read -r image; do
    if [[ "$image" == */"dray-$1/image.sif" || "$1" == /* && "$(readlink -- "${image%/*}/source")" == "$1" ]]; then
      printf '%s\n' "$image"
      return
    fi
  done < <(adopt::all)
  return 1
}

adopt::image() { # NAME|FILE: its image, adopted on the way where it is a file; what was adopted must be unchanged
  local image
  if image="$(adopt::find "$1")"; then
    adopt::unchanged "$image"
  elif [[ "$1" == /* ]]; then
    image="$(adopt::make "$1" "$(adopt::name "$1")")" || exit
  else
    lib::die 78 "there is no adopted image $1" "wanted: adopted=/WHOLE/PATH/OF/A.sif, or one of: $(adopt::names | paste --serial --delimiters=' ')" \
      "fix:    slurm/dray image adopt FILE.sif --name $1"
  fi
  echo "$image"
}

adopt::unchanged() { # IMAGE
  local file="${1%/*}/source" named wanted found
  [[ -L "$file" ]] || file="$1"
  named="$(readlink -- "$file" || echo "$file")"
  wanted="$(adopt::value "$1" file)"
  found="$(stat --dereference --format="$adopt__facts" -- "$file" 2>&1)" || true
  [[ "$found" == "$wanted" ]] || lib::die 78 "the image was changed since it was adopted" "where:  $named on node $(</proc/sys/kernel/hostname)" \
    "wanted: $wanted" "found:  $found" \
    "fix:    $(printf '%q ' "$DRAY_HOME/slurm/dray" image adopt "$(adopt::value "$1" source)" --name "$(adopt::value "$1" name)")--force"
}

adopt::name() { # FILE: the file's own name, as a name of an image; with a number that the path gives, where another has it
  local name="${1##*/}"
  name="${name%.*}"
  name="$(tr --complement --squeeze-repeats 'a-z0-9_\n' - <<<"${name,,}" | sed 's/^[-_]*//; s/[-_]*$//')"
  name="${name:0:50}"
  if [[ -z "$name" || " ${engine__variants[*]} " == *" $name "* ]] || adopt::find "$name" >/dev/null; then
    name="${name:-image}-$(printf '%s' "$1" | sha256sum | head --bytes=8)"
  fi
  echo "$name"
}

adopt::home() { # the folder for images that are adopted
  local home
  for home in "$DRAY_HOME/build" "$runs/.adopted"; do
    ! mkdir -p -- "$home" 2>/dev/null || [[ ! -w "$home" ]] || { echo "$home"; return; }
  done
  lib::die 78 "no folder can be written for an adopted image" "where:  $DRAY_HOME/build and $runs" \
    "fix:    set DRAY_RUNS to a folder that you may write and that all nodes share"
}

adopt::others() { # FILE: who besides its owner may write its bytes, or put another file in its place
  local mode folder
  mode="$(stat --dereference --format=%a -- "$1")"
  folder="$(stat --format=%a -- "$(dirname -- "$(realpath -- "$1")")")"
  if ((8#$mode & 8#22)); then
    echo "its mode is $mode"
  elif ((8#$folder & 8#2 && !(8#$folder & 8#1000))); then
    echo "its folder has the mode $folder"
  fi
}

adopt::make() ( # FILE NAME [FORCE]: prints the image. One rename gives its folder the name; another job may be making it too
  local -r file="$1" name="$2" force="${3:-}"
  local home scratch facts digest others began=$SECONDS
  umask 022 # what is not private in it, other users of the checkout may use
  [[ "$engine" == apptainer || "$engine" == singularity ]] || lib::die 78 "$engine does not start an adopted image, which is a SIF" \
    "found:  adopted=$file" "fix:    use a node with apptainer or singularity, or leave it out: adopted="
  [[ -f "$file" && -r "$file" ]] || lib::die 78 "the image does not exist, or cannot be read" "where:  $file on node $(</proc/sys/kernel/hostname)" \
    "wanted: a SIF" "fix:    correct the path: adopted=/WHOLE/PATH/OF/A.sif"
  [[ "$(engine::kind "$file")" == sif ]] || lib::die 78 "the image is no SIF" "where:  $file" \
    "fix:    of an archive or a folder of OCI make one first: $engine build x.sif docker-archive:$(printf %q "$file")"
  home="$(adopt::home)" || exit
  scratch="$(mktemp --directory -- "$home/.adopt-XXXXXX")"
  trap 'rm -rf -- "$scratch"' EXIT
  echo "dray: adopt $file" >&2
  ln --symbolic -- "$file" "$scratch/source"
  facts="$(stat --dereference --format="$adopt__facts" -- "$file")"
  others="$(adopt::others "$file")"
  if [[ -z "$others" ]]; then
    ln --symbolic source "$scratch/image.sif"
  else
    echo "  it is copied, since others may write it: $others" >&2
    cp -- "$file" "$scratch/image.sif" || lib::die 69 "the image cannot be copied" "where:  $scratch" \
      "fix:    free space on that disk; or have its owner take the right to write from others: chmod go-w $(printf %q "$file")"
    chmod 0644 -- "$scratch/image.sif"
  fi
  digest="$(sha256sum <"$scratch/image.sif")" || lib::die 69 "the image cannot be read" "where:  $file" "fix:    copy it again"
  echo "  read in $((SECONDS - began)) s: sha256:${digest%% *}" >&2
  adopt::look "$scratch" "$name" "$file" "$facts" "${digest%% *}" || exit
  [[ "$(stat --dereference --format="$adopt__facts" -- "$file")" == "$facts" ]] ||
    lib::die 75 "the image changed while dray read it" "where:  $file" "fix:    try again"
  chmod 0755 -- "$scratch"
  if [[ -n "$force" && -d "$home/dray-$name" ]]; then
    mv --no-target-directory -- "$home/dray-$name" "$scratch/old"
  fi
  mv --no-target-directory -- "$scratch" "$home/dray-$name" 2>/dev/null ||
    adopt::find "$file" >/dev/null || # another job was quicker
    lib::die 69 "the adopted image does not get its name" "where:  $home/dray-$name" "fix:    give another: slurm/dray image adopt FILE --name NAME"
  rm -rf -- "$home/dray-$name/old"
  echo "dray: adopted in $((SECONDS - began)) s: adopted=$name" >&2
  echo "$home/dray-$name/image.sif"
)

adopt::main() { # FILE [--name NAME] [--force]: at a login node
  local file="" name="" force="" image engine
  local -r runs="$(realpath -m -- "${DRAY_RUNS:-runs}")"
  lib::given "$@"
  while (($#)); do
    case "$1" in
      --name=*) name="${1#*=}" ;;
      --name)
        name="${2:-}"
        shift $(($# > 1))
        ;;
      --force) force=1 ;;
      -*) file="" && break ;;
      *) file="$1" ;;
    esac
    shift
  done
  [[ -n "$file" ]] || lib::die 78 "slurm/dray image adopt needs a file" "wanted: FILE [--name NAME] [--force]" ${1:+"found:  $1"} \
    "fix:    slurm/dray image adopt /WHOLE/PATH/OF/A.sif"
  [[ "$file" != *://* ]] || lib::die 78 "slurm/dray adopts files" "found:  $file" \
    "fix:    apptainer pull x.sif $(printf %q "$file") && slurm/dray image adopt x.sif"
  file="$(realpath --no-symlinks -- "$file")"
  engine="$(engine::found)"
  if [[ -z "$name" ]] && image="$(adopt::find "$file")"; then
    name="$(sed 's|.*/dray-||; s|/image.sif$||' <<<"$image")"
    [[ -n "$force" ]] || { adopt::unchanged "$image" && echo "$image"; return; }
  fi
  name="${name:-$(adopt::name "$file")}"
  [[ "$name" =~ ^[a-z0-9][a-z0-9_-]{0,62}$ && " ${engine__variants[*]} " != *" $name "* ]] ||
    lib::die 78 "not a name for an adopted image" "wanted: small letters, digits, _ and -, and none of ${engine__variants[*]}" \
      "found:  $name" "fix:    --name mine"
  [[ -n "$force" ]] || ! image="$(adopt::find "$name")" || lib::die 78 "there is an image of this name" "where:  ${image%/*}" \
    "fix:    give another one: --name $name-2; or replace it: --force"
  adopt::make "$file" "$name" "$force"
}

adopt::look() { # FOLDER NAME FILE FACTS DIGEST: what the image's own Python says, and what is brought
  local found code=0 name
  local -a folders=("$DRAY_HOME" "${1%/*}") mounts pip=()
  found="$("$engine" --quiet exec --cleanenv --no-eval --no-mount=home,cwd --contain --pwd=/ "$1/image.sif" \
    python3 -c "$(<"$DRAY_HOME/src/dray/checks/list_packages.py")")" || code=$?
  [[ "$found" =~ \"python\":\ \"([0-9]+)\.([0-9]+) ]] || lib::die 69 "the image does not start, or has no python3" "where:  $3" \
    "found:  exit code $code; the lines above say more" "fix:    $engine exec $(printf %q "$3") python3 --version"
  ((BASH_REMATCH[1] == 3 && BASH_REMATCH[2] >= 11)) || lib::die 78 "the image's Python is too old for dray" "where:  $3" \
    "wanted: Python 3.11 or newer" "found:  ${BASH_REMATCH[1]}.${BASH_REMATCH[2]}" "fix:    take a newer image, or dray image build"
  # Where pip looks is the user's to say.
  for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY PIP_{INDEX_URL,EXTRA_INDEX_URL,FIND_LINKS,CERT,CONFIG_FILE,TRUSTED_HOST} \
    SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
    [[ -z "${!name:-}" ]] || pip+=("$name=${!name}")
    [[ "${!name:-}" != /* || ! -e "${!name}" ]] || folders+=("${!name}")
  done
  name="${XDG_CONFIG_HOME:-${HOME:-}/.config}/pip/pip.conf"
  [[ -n "${PIP_CONFIG_FILE:-}" || ! -f "$name" ]] || folders+=("$name") pip+=("PIP_CONFIG_FILE=$name")
  engine::mounts
  mkdir -- "$1/tmp"
  "$engine" --quiet exec --cleanenv --no-eval --no-mount=home,cwd --contain "${mounts[@]}" --pwd "$1" "$1/image.sif" \
    env "${pip[@]}" "TMPDIR=$1/tmp" PYTHONDONTWRITEBYTECODE=1 \
    python3 -c 'import sys; sys.path.insert(0, sys.argv[1] + "/src"); from dray.images import adopted_folder; adopted_folder.main()' \
    "$DRAY_HOME" "$1" "$2" "$3" "$4" "$5" <<<"$found" >&2 || code=$?
  rm -rf -- "$1/tmp"
  return "$code"
}
