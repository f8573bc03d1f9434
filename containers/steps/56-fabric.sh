#!/usr/bin/env bash
# aws-ofi-nccl, by which NCCL and RCCL reach Slingshot through libfabric, where image.toml names its source. There is no
# libfabric in the image: a run binds the site's own, which fits the site's cards and driver.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

compgen -G "$INPUTS/sources/aws-ofi-nccl-*.tar" >/dev/null || exit 0

# Always this folder, as for DeepSpeed; and all paths in the sources are relative to it.
readonly BUILD=/var/lib/dray-build
readonly OUT=$VENV/fabric
trap 'rm -rf "$BUILD"' EXIT
mkdir -p "$BUILD"/{lib,objects} "$OUT"

sources::unpack() {
    local tar
    for tar in "$INPUTS"/sources/*.tar; do
        tar --extract --file "$tar" --directory "$BUILD" --no-same-owner
    done
}

# What the plugin's configure would write. The headers are those of libfabric 1.19: with 1.20's comes a layout of structures
# that a site's 1.15 does not have, and without 1.18's FI_OPT_CUDA_API_PERMITTED the plugin ends with an error where the
# site's libfabric is newer.
config::write() {
    cat >"$BUILD/config.h" <<CONFIG
#define PACKAGE_NAME "aws-ofi-nccl"
#define PACKAGE_STRING "aws-ofi-nccl $1"
#define PACKAGE_VERSION "$1"
#define HAVE_$2 1
$([[ $2 == CUDA ]] || echo "#define __HIP_PLATFORM_AMD__ 1")
#define ENABLE_CUDART_DYNAMIC 1
#define HAVE_CUDA_DMABUF_SUPPORT 1
#define HAVE_CUDA_DMABUF_MAPPING_TYPE_PCIE 1
#define HAVE_CUDA_GDRFLUSH_SUPPORT 1
#define HAVE_DECL_FI_OPT_CUDA_API_PERMITTED 1
#define HAVE_DECL_FI_OPT_SHARED_MEMORY_PERMITTED 0
#define HAVE_DECL_FI_OPT_INJECT_RMA_SIZE 0
#define HAVE_DECL_FI_MR_DMABUF 0
#define HAVE_LINUX_LIMITS_H 1
#define HAVE_GETTID 1
#define HAVE_MEMFD_CREATE 1
#define MEMCHECK_REDZONE_SIZE 0
#define NDEBUG 1
#include "nccl_ofi_config_bottom.h"
CONFIG
}

# The functions of libfabric that the plugin calls, each in its version of libfabric 1.9, which every newer one still has.
# Only the linker and the proof at the end see it.
libfabric::stand_in() {
    printf 'void %s(void) {}\n' fi_{dupinfo,fabric,freeinfo,getinfo,strerror,version} >"$BUILD/libfabric.c"
    cat >"$BUILD/libfabric.map" <<'MAP'
FABRIC_1.0 { fi_strerror; fi_version; };
FABRIC_1.1 { fi_fabric; } FABRIC_1.0;
FABRIC_1.3 { fi_dupinfo; fi_freeinfo; fi_getinfo; } FABRIC_1.1;
MAP
    gcc -shared -o "$BUILD/lib/libfabric.so.1" "$BUILD/libfabric.c" \
        -Wl,-soname,libfabric.so.1,--version-script="$BUILD/libfabric.map"
}

# plugin::compile HEADERS SOURCE...: Triton's wheel has the headers of CUDA and HIP for all variants.
plugin::compile() {
    local headers
    headers=$(compgen -G "$VENV/lib/python*/site-packages/triton/backends/$1/include")
    local -r options=(-std=c++17 -fno-rtti -O2 -fPIC -fvisibility=hidden -pthread -D_GNU_SOURCE
        "-ffile-prefix-map=$headers=." -DXML_DIR='"/nowhere"' -I.. -Iinclude -isystem 3rd-party
        -isystem 3rd-party/nccl/cuda/include -isystem ../libfabric/include -isystem "$headers")
    local source
    for source in "${@:2}"; do
        printf '%s\0%s\0' "../objects/$(basename "$source" .cpp).o" "$source"
    done | xargs --null --max-args=2 --max-procs="$(nproc)" g++ "${options[@]}" -c -o
}

sources::unpack
cd "$BUILD"/aws-ofi-nccl-*/
version=${PWD##*-}
ln -s "$BUILD"/libfabric-*/ "$BUILD/libfabric"
libfabric::stand_in
sources=(src/cm/*.cpp src/tracepoint.cpp)
for source in src/nccl_ofi_*.cpp; do
    [[ $source =~ _(cuda|rocm|neuron)\.cpp$ ]] || sources+=("$source")
done
case $DRAY_ACCELERATOR in
    cuda)
        config::write "$version" CUDA
        plugin::compile nvidia "${sources[@]}" src/nccl_ofi_cuda.cpp src/gin/*.cpp
        # The plugin opens libcudart.so, a name that no wheel has; through this link it opens the one that torch has loaded.
        cudart=$(compgen -G "$VENV/lib/python*/site-packages/nvidia/*/lib/libcudart.so.*")
        ln -s "..${cudart#"$VENV"}" "$OUT/libcudart.so"
        libraries=() beside=
        ;;
    rocm)
        config::write "$version" ROCM
        plugin::compile amd "${sources[@]}" src/nccl_ofi_rocm.cpp
        libraries=("$(compgen -G "$VENV/lib/python*/site-packages/torch/lib/libamdhip64.so*")")
        beside=/..$(dirname "${libraries[0]#"$VENV"}")
        ;;
esac
# shellcheck disable=SC2016  # the loader knows $ORIGIN
g++ -shared -s -pthread -o "$OUT/libnccl-net-ofi.so" ../objects/*.o "$BUILD/lib/libfabric.so.1" "${libraries[@]}" -lhwloc \
    -ldl -Wl,-z,defs,--allow-shlib-undefined,-rpath,'$ORIGIN'"$beside"
install -D --mode=644 LICENSE NOTICE --target-directory="$OUT/licenses/aws-ofi-nccl"
install -D --mode=644 ../libfabric/COPYING --target-directory="$OUT/licenses/libfabric"
# As NCCL loads it: every function that it calls is found.
LD_LIBRARY_PATH=$BUILD/lib "$VENV/bin/python3" -c 'import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)' \
    "$OUT/libnccl-net-ofi.so"

# apt removes by name only what came as files of debs/; what the base had before stays.
readonly UNNEEDED=(autoconf automake autotools-dev libgdbm-compat4 libgdbm6 libhwloc-dev libltdl-dev libltdl7
    libnuma-dev libnuma1 libperl5.36 m4 perl perl-modules-5.36)
brought=()
for name in "${UNNEEDED[@]}"; do
    ! compgen -G "$INPUTS/debs/${name}_*.deb" >/dev/null || brought+=("$name")
done
apt::get purge --yes "${brought[@]}"
