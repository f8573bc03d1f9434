#!/usr/bin/env bash
# Sourced by slurm/lib.sh: what a job plans, and all else that runs in the image outside of the nodes' own start.
# The planning itself runs inside the image (docs/adr/0001-planning-runs-inside-the-image.md).
# It uses what lib::main has set, and sets what it says.
# shellcheck disable=SC2154

plan::unknown() { # KEY VALUE
  lib::die 78 "the planner gives an unknown answer" "where:  $image" "found:  $(printf '%q' "$1=$2")" \
    "fix:    use an image and a checkout of the same version of dray"
}

plan::last() { # neither a recipe nor a command is given: the run's last plan has both; sets given_image to its image
  local file plan="" number
  for number in "${!settings[@]}"; do
    [[ "${settings[number]}" == *=* ]] || lib::die 78 "there is nothing to run: a program stands in the place of a setting" \
      "wanted: [key=value ...] -- COMMAND ..." "found:  ${settings[number]}" \
      "fix:    put -- before it:$(printf ' %q' sbatch slurm/multinode.sh "${settings[@]:0:number}" -- "${settings[@]:number}")"
  done
  [[ -z "$given_run" ]] || plan="$(printf '%s\n' "$runs/${given_run##*/}"/attempt-*/plan.json | sort --version-sort | tail --lines=1)"
  [[ -f "$plan" ]] || lib::die 78 "there is nothing to run" ${given_run:+"where:  $runs/${given_run##*/}, which has no plan"} \
    "wanted: RECIPE [key=value ...], or [key=value ...] -- COMMAND ..., or --run=NAME of a run that is there" \
    "fix:    sbatch slurm/multinode.sh recipes/smoke-cpu.toml"
  # Another user's plan names any image. The planner refuses that of a run that is not this user's.
  [[ -z "$given_image" && -O "$plan" && " ${settings[*]} " != *" image="* && " ${settings[*]} " != *" adopted="* ]] || return 0
  file="$(sed -n 's/^image=//p' "${plan%/*}/facts.txt")" || true
  [[ ! -f "$file" || "$file" -ef "$DRAY_HOME/build/$(basename -- "$file")" ]] || given_image="$file"
}

plan::guess() { # [key=value ...]: an image to plan in; the planner says which one the recipe wants
  # shellcheck disable=SC2034 # engine::traits sets all that it knows
  local setting variant=cpu adopted="" name formats suffix store never
  engine::traits
  [[ -z "$recipe" ]] || adopted="$(sed -n 's/^adopted *= *"\([^"]*\)".*/\1/p' "$recipe" | head --lines=1)"
  for setting in "$@"; do
    [[ "$setting" != image=* || " ${engine__variants[*]} " != *" ${setting#image=} "* ]] || variant="${setting#image=}"
    [[ "$setting" != adopted=* ]] || adopted="${setting#adopted=}"
  done
  if [[ -z "$given_image" && "$suffix" == sif && -n "$adopted" ]]; then
    engine::image "$adopted"
    return
  fi
  if [[ -z "$given_image" && -n "$formats" && ! -f "$DRAY_HOME/build/dray-$variant.$suffix" ]]; then
    for name in "${engine__variants[@]}"; do
      [[ ! -f "$DRAY_HOME/build/dray-$name.$suffix" ]] || { engine::image "$name"; return; }
    done
    name=""
    [[ "$suffix" != sif ]] || read -r name < <(adopt::names) || true
    variant="${name:-$variant}"
  fi
  engine::image "$variant"
}

plan::inside() { # COMMAND...: run in the image, which sees the checkout, the recipe's folder and what the run keeps
  local -a folders=("$DRAY_HOME")
  local folder
  [[ ! -f "$site" ]] || folders+=("$site")
  ! adopt::is "$image" || folders+=("${image%/*}")
  for folder in "$own_sites" "${HF_HOME:-}" "$checkpoints"; do
    [[ "$folder" != /* || ! -d "$folder" ]] || folders+=("$folder")
  done
  for folder in ${layer:+"$layer" "$layer.json"} "${recipe%/*}" "$runs" "$where"; do
    [[ -z "$folder" || "$folder/" == "$DRAY_HOME/"* ]] || folders+=("$folder")
  done
  engine::inside "$@"
}

plan::attempt() { # [key=value ...]: plans, in two starts of the image at most; a third where only an adopted image that bash could
  # not guess tells which layer fits it. Sets all that plan::answer names
  local facts answer line image_digest=""
  local -a variables=()
  attempt=""
  for _ in 1 2 3; do
    facts="$("$DRAY_HOME/slurm/probe.sh" "$engine" "$image" "$site" "${variables[@]}")" || exit
    facts+=$'\n'"layer=$layer"$'\n'"image_given=$((${#given_image} > 0))"$'\n'"image_digest=$image_digest"$'\n'"lost=${lost[*]}"
    ! adopt::is "$image" || facts+=$'\n'"image_file=$(stat --dereference --format="$adopt__facts" -- "$image")"
    answer="$(plan::ask "$facts" "$@")" || exit
    while IFS= read -r line; do
      plan::answer "${line%%=*}" "${line#*=}"
    done <<<"$answer"
    [[ -n "$attempt" ]] || continue
    # The recipe shares the run with the group: runs.share = "group".
    [[ "$(stat --format=%a -- "${attempt%/*}")" != 2750 ]] || umask g=rx
    return
  done
  lib::die 78 "the planner still asks for another image or engine" "where:  $image, started by $engine" "found:  $answer"
}

plan::answer() { # KEY VALUE: what the nodes need of the plan, or a fact that was wrong
  local -r key="$1" value="$2"
  # The planner is in the image, which may be another user's; what is in the attempt's folder is started outside of it.
  local -rA like=(
    [attempt]='/.+/[^./][^/]*/attempt-[0-9]+' [checkpoints]='.*' [grace_s]='[0-9]{1,5}' [stage]='(/.+/dray-[^/]+\.sif)?'
    [spares]='([A-Za-z0-9][A-Za-z0-9._,-]*)?' [engine]="$(IFS='|' && echo "${engine__names[*]}")"
    [image]='[a-z0-9][a-z0-9_-]*|/[^[:cntrl:]]+' [image_digest]='()' [layer]='/[^[:cntrl:]]+' [variables]='.*'
    [choices]='([a-z_]+=[a-z0-9_]+ ?)+'
  )
  [[ -n "$key" && "$value" =~ ^(${like["$key"]:-.^})$ && ("$key" != attempt || "${value%/*/*}" == "$runs") ]] ||
    plan::unknown "$key" "$value"
  case "$key" in
    image) image="$(engine::image "$value")" || exit ;;
    variables) read -ra variables <<<"$value" ;;
    image_digest) image_digest="sha256:$(sha256sum <"$image" | cut --delimiter=' ' --fields=1)" ;;
    *) printf -v "$key" '%s' "$value" ;;&
    engine) [[ -z "$given_image" ]] || image="$(engine::image cpu)" || exit ;;
    layer)
      [[ -f "$layer" && -f "$layer.json" ]] || lib::die 78 "the layer does not exist, or its record does not" \
        "wanted: $layer and $layer.json" "fix:    make it with dray image layer, or copy both files"
      # In the image all other users may look the same.
      [[ "$(stat --dereference --format=%u -- "$layer")" =~ ^(0|$EUID)$ ]] || lib::die 78 \
        "another user may change the layer, and every rank runs its code" "where:  $layer" "wanted: a file of yours or of root's" \
        "found:  $(stat --dereference --format='a file of user %u, mode %a' -- "$layer")" \
        "fix:    once you trust what is in it: cp $(printf %q "$layer"){,.json} $(printf %q "$DRAY_HOME")/build/"
      ;;
  esac
}

plan::ask() { # FACTS [key=value ...]: what the planner in the image answers; the facts hold this environment: no file
  local -a begun=()
  [[ -z "$given_run" ]] || begun=(--run "$(basename -- "$given_run")")
  [[ -z "$gpu_memory" ]] || begun+=(--gpu-memory "$gpu_memory")
  local -r facts="$1"
  local code=0
  shift
  printf '%s\n' "$facts" | plan::inside python3 -m dray plan --write --runs "$runs" "${begun[@]}" \
    ${recipe:+"$recipe"} "$@" "${command[@]}" || code=$?
  ((code != 0)) || return 0
  if ((code != 69 && code != 75 && code != 78)) && ! plan::inside python3 -c 'import dray' 2>/dev/null; then
    lib::die 78 "dray does not start in the image, or is not in it" "where:  $image on node $(</proc/sys/kernel/hostname)" \
      "found:  exit code $code" "fix:    adopted=/WHOLE/PATH/OF/A.sif takes an image without dray; or build one with dray (make image-cpu)"
  fi
  return "$code"
}
