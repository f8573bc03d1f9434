#!/usr/bin/env bash
# cotainr starts this in place of Apptainer. It fetches "the latest" Miniforge by no hash, and runs it: here is the one
# moment at which dray can see what that is.
set -euo pipefail

# Without this folder, which dray puts first.
PATH=${PATH#*:}

if [[ " $* " == *" bash conda_installer.sh "* ]]; then
    found=$(sha256sum <conda_installer.sh)
    wanted=$(<"$(dirname "$0")/../miniforge")
    printf 'sha256:%s' "${found%% *}" >"$TMPDIR/miniforge"
    if [[ -n $wanted && $wanted != "sha256:${found%% *}" ]]; then
        echo "FATAL: Miniforge is sha256:${found%% *}, and not $wanted" >&2
        exit 1
    fi
fi
exec "$(command -v apptainer || command -v singularity)" "$@"
