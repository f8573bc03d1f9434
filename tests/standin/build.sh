#!/usr/bin/env bash
# build.sh PYTHON FOLDER: build the stand-in GPU for that Python's torch (a CUDA build). Then: . FOLDER/env.sh; PYTHON ...
set -euo pipefail
export LC_ALL=C  # sort and comm have one order

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$2/lib"
out="$(cd "$2" && pwd)"
packages="$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
readonly here out packages

includes=()
for folder in /usr/local/cuda/include "$packages"/nvidia/*/include "$packages/triton/backends/nvidia/include"; do
  [[ ! -d "$folder" ]] || includes+=("-I$folder")
done
flags=(-O1 -w -std=c++17 -fPIC -fpermissive "${includes[@]}")

for name in runtime libraries; do
  g++ "${flags[@]}" -c "$here/$name.cpp" -o "$out/$name.o"
done

# What torch imports from NVIDIA's libraries and is not written here does nothing, and returns 0, which is success.
nm --dynamic --undefined-only "$packages"/torch/lib/*.so 2>/dev/null | awk '{print $2}' | cut -d@ -f1 |
  grep -E '^(cuda|__cuda|cublas|cudnn|cufft|cusolver|cusparse|nccl)[A-Z]' | sort -u >"$out/imported"
nm --defined-only "$out/runtime.o" "$out/libraries.o" | awk '{print $3}' | sort -u >"$out/defined"
comm -23 "$out/imported" "$out/defined" | sed 's/.*/int &(void) { return 0; }/' >"$out/rest.c"
gcc -O1 -w -fPIC -c "$out/rest.c" -o "$out/rest.o"

g++ -shared -o "$out/preload.so" "$out/runtime.o" "$out/libraries.o" "$out/rest.o" -ldl
g++ "${flags[@]}" -shared -Wl,-soname,libcuda.so.1 -o "$out/lib/libcuda.so.1" "$here/driver.cpp" -ldl
g++ "${flags[@]}" -shared -Wl,-soname,libnvidia-ml.so.1 -o "$out/lib/libnvidia-ml.so.1" "$here/nvml.cpp"

cat >"$out/env.sh" <<EOF
export LD_PRELOAD="$out/preload.so" LD_LIBRARY_PATH="$out/lib" TRITON_LIBCUDA_PATH="$out/lib"
export PYTORCH_NVML_BASED_CUDA_CHECK=1
EOF
