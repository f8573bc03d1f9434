#!/usr/bin/env bash
# DeepSpeed, which comes as a source only, with the operators compiled that need no device of this machine: no node
# compiles them when a job starts.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

# Always this folder, since its name gets into the operators; and not /tmp, which is the host's.
readonly BUILD=/var/lib/dray-build
trap 'rm -rf "$BUILD"' EXIT
mkdir -p "$BUILD"/{home,lib,tmp,tools}

# DeepSpeed compiles for the machine that builds (-march=native). The image runs on others, and is to have the same
# bytes wherever it was built: x86-64-v3 is every x86 with AVX2, Haswell and Zen; armv8.2-a is Grace and Altra.
# What stands last on the command line wins. -laio: DeepSpeed forgets it where it compiles without CUDA.
compiler::write() {
    local baseline
    case $(uname -m) in
        x86_64) baseline="-march=x86-64-v3 -D__AVX256__ -U__AVX512__ -U__SCALAR__" ;;
        aarch64) baseline="-march=armv8.2-a -D__NEON__ -U__SVE__ -U__SCALAR__" ;;
        *) log::line "wanted: x86_64 or aarch64; found: $(uname -m)"; exit 69 ;;
    esac
    printf '#!/bin/sh\nexec /usr/bin/g++ -Wl,--as-needed "$@" %s -g0 -s -fopenmp -laio\n' "$baseline" >"$BUILD/g++"
    chmod +x "$BUILD/g++"
}

# The compiler is for this step only; torch's own packages bring the other headers and the library to link.
cuda::prepare() {
    pip::install --require-hashes --find-links "$INPUTS/wheels" --target "$BUILD/tools" \
        --requirement "$INPUTS/build.lock"
    local site
    site=$(dirname "$(compgen -G "$VENV/lib/python*/site-packages/nvidia/cu13/lib/libcudart.so.*")")
    export CUDA_HOME=$BUILD/tools/nvidia/cu13
    export CPATH=$site/../include LIBRARY_PATH=$BUILD/lib
    export DS_BUILD_FUSED_ADAM=1 TORCH_CUDA_ARCH_LIST=$DRAY_ARCHITECTURES
    ln -s "$site"/libcudart.so.* "$BUILD/lib/libcudart.so"
    # No driver is here, and nothing needs one to be linked.
    ar rc "$BUILD/lib/libcuda.a"
}

sdist=$(echo "$INPUTS"/wheels/deepspeed-*.tar.gz)
hash=$(sha256sum "$sdist" | cut --delimiter=' ' --fields=1)
if ! grep --quiet "sha256:$hash" "$INPUTS/requirements.lock"; then
    log::line "wanted: $sdist with a hash of requirements.lock; found: sha256:$hash"
    exit 78
fi
tar --extract --file "$sdist" --directory "$BUILD" --no-same-owner

compiler::write
export CXX=$BUILD/g++ HOME=$BUILD/home TMPDIR=$BUILD/tmp PATH=$VENV/bin:$PATH
export DS_BUILD_CPU_ADAM=1 DS_BUILD_AIO=1 DS_ENABLE_NINJA=1
case $DRAY_ACCELERATOR in
    cpu) export DS_ACCELERATOR=cpu DS_BUILD_FUSED_ADAM=1 DS_BUILD_SHM_COMM=1 ;;
    *) export DS_ACCELERATOR=cuda ;; # DeepSpeed's word for ROCm too.
esac
[[ ! -e $INPUTS/build.lock ]] || cuda::prepare

cd "$BUILD"/deepspeed-*/
if ! python3 setup.py --quiet bdist_wheel --dist-dir "$BUILD" >"$BUILD/log" 2>&1; then
    tail --lines=40 "$BUILD/log"
    exit 1
fi
# By its name, as a path would be written down in the image.
pip::install --find-links "$BUILD" deepspeed
