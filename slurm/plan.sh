#!/usr/bin/env bash
# Sourced by slurm/job.sh: what a job plans, and all else that runs in the image outside of the nodes' own start.
# The planning itself runs inside the image (docs/adr/0001-planning-runs-inside-the-image.md).
# It uses what job::main has set, and sets what it says.
# shellcheck disable=SC2154

plan::unknown() { # KEY VALUE
  job::die 78 "the planner gives an unknown answer" "where:  $image" "found:  $(printf '%q' "$1=$2")" \
    "fix:    use an image and a checkout of the same version of dray"
}

plan::last() { # sets given_image to that of the run's last attempt, if the user named it: the run goes on in it
  local -r named=$'\nimage=([^\n]+)\nimage_given=1\n'
  local plan
  plan="$(printf '%s\n' "$runs/${given_run##*/}"/attempt-*/plan.json | sort --version-sort | tail --lines=1)"
  # Another user's plan names any image. The planner refuses that of a run that is not this user's.
  [[ -O "$plan" && " ${settings[*]} " != *" image="* && " ${settings[*]} " != *" adopted="* ]] || return 0
  [[ ! "$(cat "${plan%/*}/facts.txt" 2>/dev/null)" =~ $named ]] || given_image="${BASH_REMATCH[1]}"
}

plan::guess() { # [key=value ...]: an image to plan in; the planner says which one the recipe wants
  local -r suffix="${engine__suffix["$engine"]}"
  local setting variant=cpu adopted="" name
  [[ -z "$recipe" ]] || adopted="$(sed -n 's/^adopted *= *"\([^"]*\)".*/\1/p' "$recipe" | head --lines=1)"
  for setting in "$@"; do
    [[ "$setting" != image=* || " ${engine__variants[*]} " != *" ${setting#image=} "* ]] || variant="${setting#image=}"
    [[ "$setting" != adopted=* ]] || adopted="${setting#adopted=}"
  done
  if [[ "$suffix" == sif && -n "$adopted" ]]; then
    variant="$adopted"
  elif [[ -z "$given_image" && -n "${engine__formats["$engine"]}" ]]; then
    for name in "$variant" "${engine__variants[@]}"; do
      [[ ! -f "$DRAY_HOME/build/dray-$name.$suffix" ]] || { engine::image "$name"; return; }
    done
    [[ "$suffix" == sif ]] && read -r name < <(adopt::names) && variant="$name"
  fi
  engine::image "$variant"
}

plan::inside() { # COMMAND...: run in the image, which sees the checkout, the recipe's folder and what the run keeps
  local -a folders=("$DRAY_HOME")
  local folder
  ! adopt::is "$image" || folders+=("${image%/*}")
  for folder in "$site" "$checkpoints" ${layer:+"$layer" "$layer.json"} "${webhook:-}" "${recipe%/*}" "$runs" "$where"; do
    [[ "$folder" != /* || ! -e "$folder" || "$folder/" == "$DRAY_HOME/"* ]] || folders+=("$folder")
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
  job::die 78 "the planner still asks for another image or engine" "where:  $image, started by $engine" "found:  $answer"
}

plan::answer() { # KEY VALUE: what the nodes need of the plan, or a fact that was wrong
  local -r key="$1" value="$2"
  local found
  # The planner is in the image, which may be another user's; what is in the attempt's folder is started outside of it.
  local -rA like=(
    [attempt]='/.+/[^./][^/]*/attempt-[0-9]+' [checkpoints]='.*' [stage]='(/.+/dray-[^/]+\.sif)?'
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
      found="$(stat --dereference --format='a file of user %u' -- "$layer" "$layer.json" 2>&1)" || true
      # In the image all other users may look the same.
      [[ "$found" =~ ^"a file of user "(0|$EUID)$'\n'"a file of user "[0-9]+$ ]] || job::die 78 "the layer is missing, or another user may change it, and every rank runs its code" \
        "wanted: $layer, a file of yours or of root's, and $layer.json" "found:  ${found//$'\n'/, }" \
        "fix:    make it with dray image layer; or once you trust what is in it: cp $(printf %q "$layer"){,.json} $(printf %q "$DRAY_HOME")/build/"
      ;;
  esac
}

plan::ask() { # FACTS [key=value ...]: what the planner in the image answers; the facts hold this environment: no file
  local code=0
  printf '%s\n' "$1" | plan::inside python3 -m dray plan --write --runs "$runs" ${given_run:+--run "${given_run##*/}"} \
    ${gpu_memory:+--gpu-memory "$gpu_memory"} ${recipe:+"$recipe"} "${@:2}" "${command[@]}" || code=$?
  ((code != 0)) || return 0
  if ((code != 69 && code != 75 && code != 78)) && ! plan::inside python3 -c 'import dray' 2>/dev/null; then
    job::die 78 "dray does not start in the image, or is not in it" "where:  $image on node $(</proc/sys/kernel/hostname)" \
      "found:  exit code $code" "fix:    adopted=/WHOLE/PATH/OF/A.sif takes an image without dray; or build one with dray (make image-cpu)"
  fi
  return "$code"
}
