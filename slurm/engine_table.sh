#!/usr/bin/env bash
# What src/dray/engines says of the engines of a job; tests/unit/engines/test_engine_table.py writes this file.
# shellcheck disable=SC2034,SC2054,SC2154,SC2207

readonly -a engine__names=(apptainer singularity pyxis edf podman-hpc)
# The suffix of its usual image, the kinds of image that it starts, what its store puts before a name, and the
# characters that no path of a mount has.
readonly -A engine__suffix=([apptainer]='sif' [singularity]='sif' [pyxis]='sqsh' [edf]='sqsh' [podman-hpc]='sqsh')
readonly -A engine__formats=([apptainer]='sif squashfs' [singularity]='sif squashfs' [pyxis]='squashfs' [edf]='squashfs' [podman-hpc]='')
readonly -A engine__store=([apptainer]='' [singularity]='' [pyxis]='' [edf]='' [podman-hpc]='localhost/')
readonly -A engine__never=([apptainer]='' [singularity]='' [pyxis]=',:' [edf]=',:$' [podman-hpc]='')

engine::argv() { # sets `argv`, which starts a program in the image
  case "$engine" in
    apptainer) argv=(apptainer --quiet exec --cleanenv --no-eval --no-mount=home,cwd "${mounts[@]}" --pwd="$where" "$image") ;;
    singularity) argv=(singularity --quiet exec --cleanenv --no-eval --no-mount=home,cwd "${mounts[@]}" --pwd="$where" "$image") ;;
    pyxis) argv=("${engine__srun[@]}" --container-image="$image" --container-mounts="$pairs" --container-workdir="$where" --no-container-mount-home --no-container-remap-root --container-writable) ;;
    edf) argv=("${engine__srun[@]}" --environment="$edf") ;;
    podman-hpc) argv=(podman-hpc run --rm --init --interactive --label=dray.run=plan --network=host --user="$UID:$(id --group)" $( ((UID == 0)) || echo --userns=keep-id) --shm-size=1g --env=DRAY_HOME --env=DRAY_SITES "${mounts[@]}" --workdir="$where" "$image") ;;
  esac
}
