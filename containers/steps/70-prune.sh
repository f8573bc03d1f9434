#!/usr/bin/env bash
# What a run never opens goes: every image is copied to every node. What stays can still compile C and C++ against
# Python and torch, since Triton, torch.compile and DeepSpeed do that while a job runs. Licences stay.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"
shopt -s extglob nullglob

# prune REASON PATH...: what is not in this variant is no error.
prune() {
    local -r reason=$1
    shift
    local path size present=()
    for path; do
        [[ ! -e $path ]] || present+=("$path")
    done
    ((${#present[@]})) || return 0
    size=$(size_of "${present[@]}")
    rm --recursive --force -- "${present[@]}"
    log::line "$size MB less: $reason"
}

size_of() { du --total --summarize --block-size=1M -- "$@" | tail --lines=1 | cut --fields=1; }

# prune::found REASON FIND-ARGUMENT...
prune::found() {
    local -r reason=$1
    shift
    local paths
    mapfile -d '' paths < <(find "$@" -print0)
    prune "$reason" "${paths[@]}"
}

prune::python() {
    prune::found "tests of Python packages" . -name '*.dist-info' -prune -o \
        -type d '(' -name test -o -name tests ')' ! -path './torch/include/*' -prune
    prune::found "types, for editors and type checkers" . -name '*.pyi'
    prune::found "static libraries, and no extension is built on them" . -name '*.a'
    prune "torch's test programs, protoc; torch_shm_manager stays, data loaders start it" \
        torch/bin/!(torch_shm_manager) torch/lib/lib{jitbackend,torchbind}_test.so \
        torch/lib/lib{backend_with_compiler,aoti_custom_ops}.so torch/lib/libshm_windows torch/share/cmake
    prune "Triton's test tools and plugins" triton/{FileCheck,plugins,instrumentation}
    prune "Arrow's headers, and Flight, its network protocol" \
        pyarrow/include pyarrow/{lib*,_}flight*
}

prune::accelerator() {
    # The second ptxas is for 10.0 and above.
    [[ $DRAY_ARCHITECTURES =~ (^|;)1[0-9]\. ]] || prune "Triton's assembler for Blackwell" \
        triton/backends/nvidia/bin/ptxas-blackwell
    case $DRAY_ACCELERATOR in
        cpu) # ptxas stays: tests compile kernels for GPUs that are not there.
            prune "Triton's profiler for NVIDIA" triton/backends/nvidia/lib/cupti
            ;;
        cuda)
            prune "CUDA's second NVRTC and its solver for several GPUs: torch links neither" \
                nvidia/*/lib/libnvrtc*.alt.so.* nvidia/*/lib/libcusolverMg.so.*
            ;;
        rocm)
            prune "Triton's NVIDIA tools" triton/backends/nvidia/{bin,lib/cupti}
            local others=()
            for architecture in ${DRAY_ARCHITECTURES//;/ }; do
                others+=('!' -name "*$architecture*")
            done
            prune::found "kernels for GPUs other than $DRAY_ARCHITECTURES" torch/lib torch/share \
                -name '*gfx*' "${others[@]}" -prune
            ;;
    esac
}

prune::system() {
    prune "gcc's link-time optimiser" /usr/lib/gcc/*/*/lto1 /usr/bin/*lto-dump*
    prune "gcc's sanitizers" /usr/lib/*/lib{a,hwa,l,t,ub}san.so.*
    # The small ones are what every program links: libc_nonshared.a, or libpthread.a for -lpthread.
    prune::found "static libraries, and no program here is static" /usr/lib -name '*.a' -size +300k ! -name libgcc.a
    prune::found "translations of messages" /usr/share/locale -mindepth 1 -maxdepth 1 -type d
    prune::found "manuals; copyright notices stay" /usr/share -regex '/usr/share/\(man\|info\|doc\)/.*' \
        -type f ! -name copyright
}

# Names of functions that no one outside the library calls; a debugger would show them. They are loaded once here, since
# strip breaks some libraries that were patched after they were linked.
strip::libraries() {
    local -r libraries=(torch/lib/libtorch_*.so triton/_C/*.so nvidia/nccl/lib/libnccl.so.* pyarrow/lib*.so.*)
    local before
    before=$(size_of "${libraries[@]}")
    strip --strip-unneeded -- "${libraries[@]}"
    log::line "$((before - $(size_of "${libraries[@]}"))) MB less: symbols of torch, Triton, NCCL and Arrow"
    "$VENV/bin/python3" -B -c 'import torch, triton._C.libproton, triton._C.libtriton, pyarrow.dataset, pyarrow.parquet'
}

cd "$VENV"/lib/python*/site-packages
prune::python
prune::accelerator
prune::system
strip::libraries
