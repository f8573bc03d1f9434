#!/usr/bin/env bash
# DeepSpeed, which comes as a source only, with those operators compiled that jobs need: no node compiles any.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

# Always this folder, since its name gets into the operators; and not /tmp, which is the host's.
readonly BUILD=/var/lib/dray-build
trap 'rm -rf "$BUILD"' EXIT
mkdir -p "$BUILD"/{home,lib,tmp,tools}

deepspeed::unpack() {
    local sdist digest
    sdist=$(compgen -G "$INPUTS/wheels/deepspeed-*.tar.gz")
    digest=$(sha256sum "$sdist" | cut --delimiter=' ' --fields=1)
    if ! grep --quiet "sha256:$digest" "$INPUTS/requirements.lock"; then
        log::line "wanted: $sdist as in requirements.lock; found: sha256:$digest"
        exit 78
    fi
    tar --extract --file "$sdist" --directory "$BUILD" --no-same-owner
}

# DeepSpeed compiles for the processor that it is built on (-march=native): an image from a machine with AVX-512 would
# die on LUMI's, and two machines would build two images. So one level for all: x86-64-v3 is all with AVX2 (Haswell,
# Zen), armv8.2-a is Grace and Altra. What stands last in a command counts.
# -laio, where something needs it: DeepSpeed leaves it out of what it builds without CUDA.
compiler::wrap() {
    local level
    case $(uname -m) in
        x86_64) level="-march=x86-64-v3 -D__AVX256__ -U__AVX512__ -U__SCALAR__" ;;
        aarch64) level="-march=armv8.2-a -D__NEON__ -U__SVE__ -U__SCALAR__" ;;
        *)
            log::line "wanted: x86_64 or aarch64; found: $(uname -m)"
            exit 69
            ;;
    esac
    printf '#!/bin/sh\nexec /usr/bin/g++ -Wl,--as-needed -I%s/include "$@" %s -g0 -s -fopenmp -laio\n' \
        "$BUILD" "$level" >"$BUILD/g++"
    chmod +x "$BUILD/g++"
    export CXX=$BUILD/g++
}

# The compiler spends nearly all its time on the headers of torch: 30 s and more for each of 15 files. Here each file reads
# only what DeepSpeed uses of them, and the nine of async_io are one, which its headers must be told to allow. For the
# image for CPUs only: it is the one that every change of this is tried with.
deepspeed::read_less() {
    local -r py_lib=csrc/aio/py_lib
    mkdir -p "$BUILD/include/torch"
    printf '#include <%s>\n' torch/types.h torch/csrc/utils/pybind.h >"$BUILD/include/torch/extension.h"
    sed --in-place '1i #pragma once' csrc/{aio/*,pin_memory}/*.h
    cat $py_lib/deepspeed_*.cpp >>$py_lib/py_ds_aio.cpp
    truncate --size=0 $py_lib/deepspeed_*.cpp
}

# nvcc is there for this step only. What torch depends on brings the other headers, and the one library to link.
cuda::prepare() {
    pip::install --require-hashes --find-links "$INPUTS/wheels" --target "$BUILD/tools" \
        --requirement "$INPUTS/build.lock"
    local cudart
    cudart=$(compgen -G "$VENV/lib/python*/site-packages/nvidia/cu13/lib/libcudart.so.*")
    ln -s "$cudart" "$BUILD/lib/libcudart.so"
    # DeepSpeed links the driver's library, and uses nothing of it. There is no driver here.
    ar rc "$BUILD/lib/libcuda.a"
    export CUDA_HOME=$BUILD/tools/nvidia/cu13 CPATH=${cudart%/lib/*}/include LIBRARY_PATH=$BUILD/lib
    export DS_BUILD_FUSED_ADAM=1 TORCH_CUDA_ARCH_LIST=$DRAY_ARCHITECTURES
}

deepspeed::build() {
    export HOME=$BUILD/home TMPDIR=$BUILD/tmp PATH=$VENV/bin:$PATH PYTHONDONTWRITEBYTECODE=1
    export DS_ENABLE_NINJA=1 DS_BUILD_CPU_ADAM=1 DS_BUILD_AIO=1
    # cuda is DeepSpeed's word for ROCm too.
    export DS_ACCELERATOR=cuda
    [[ $DRAY_ACCELERATOR != cpu ]] || export DS_ACCELERATOR=cpu DS_BUILD_FUSED_ADAM=1 DS_BUILD_SHM_COMM=1
    cd "$BUILD"/deepspeed-*/
    [[ $DRAY_ACCELERATOR != cpu ]] || deepspeed::read_less
    if ! python3 setup.py --quiet bdist_wheel --dist-dir "$BUILD" >"$BUILD/log" 2>&1; then
        grep --max-count=20 --extended-regexp 'error:|fatal|cannot find' "$BUILD/log" || tail "$BUILD/log"
        exit 1
    fi
}

if kept::wheel deepspeed >/dev/null; then
    log::line "the operators were compiled by an earlier build from the same inputs"
    wheels=$KEPT
else
    deepspeed::unpack
    compiler::wrap
    [[ ! -e $INPUTS/build.lock ]] || cuda::prepare
    deepspeed::build
    wheels=$BUILD
    kept::keep "$BUILD"/deepspeed-*.whl
fi
# By name: given a path, pip would write it into the image.
pip::install --find-links "$wheels" deepspeed
# One asks for a module that DeepSpeed does not ship, the other for pdsh.
rm "$VENV"/bin/{ds_bench,ds_ssh}
