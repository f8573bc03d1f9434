// libcuda of the stand-in: what Triton, Inductor and the allocator's expandable segments ask the driver.
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#define OK CUDA_SUCCESS
#undef cuGetProcAddress
extern "C" {

// Of runtime.cpp, which is preloaded.
int standin_devices();
int standin_device();
bool standin_take(size_t);
void standin_give(size_t);
void standin_add(void*, size_t, int);
int standin_attribute(int, int);

static int do_nothing() { return 0; }

// The device
CUresult cuInit(unsigned) { return OK; }
CUresult cuDriverGetVersion(int* version) { *version = 13000; return OK; }
CUresult cuDeviceGetCount(int* number) { *number = standin_devices(); return OK; }
CUresult cuDeviceGet(CUdevice* device, int number) { *device = number; return OK; }
CUresult cuDeviceGetName(char* text, int size, CUdevice) { snprintf(text, size, "NVIDIA H100 80GB HBM3"); return OK; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice device) {
  *value = standin_attribute(name, device);
  return OK;
}
static CUcontext context(int device) { return (CUcontext)(0x10L + 16 * device); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* result, CUdevice device) { *result = context(device); return OK; }
CUresult cuCtxGetCurrent(CUcontext* result) { *result = context(standin_device()); return OK; }
CUresult cuCtxGetDevice(CUdevice* device) { *device = standin_device(); return OK; }
CUresult cuCtxSetCurrent(CUcontext) { return OK; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return OK; }
CUresult cuCtxPopCurrent_v2(CUcontext* result) { return cuCtxGetCurrent(result); }
CUresult cuCtxGetLimit(size_t* value, CUlimit) { *value = 1024; return OK; }
CUresult cuCtxSetLimit(CUlimit, size_t) { return OK; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "stand-in"; return OK; }
CUresult cuGetErrorName(CUresult, const char** text) { *text = "stand-in"; return OK; }

// Kernels: ptxas has made them, nobody runs them
CUresult cuModuleLoadData(CUmodule* module, const void*) { *module = (CUmodule)0x20; return OK; }
CUresult cuModuleLoad(CUmodule* module, const char*) { *module = (CUmodule)0x20; return OK; }
CUresult cuModuleUnload(CUmodule) { return OK; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { *function = (CUfunction)0x30; return OK; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute name, CUfunction) {
  *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return OK;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return OK; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return OK; }
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) { return OK; }
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**,
                        void**) { return OK; }
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { *clusters = 8; return OK; }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) { return OK; }

// Memory
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute name, CUdeviceptr pointer) {
  if (name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = pointer;
  else *(int*)value = CU_MEMORYTYPE_DEVICE;
  return OK;
}
CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr) { return OK; }
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = 2 << 20;
  return OK;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = (CUdeviceptr)start;
  standin_add(start, size, 2);
  return OK;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) { munmap((void*)pointer, size); return OK; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  if (!standin_take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = size;
  return OK;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { standin_give(handle); return OK; }
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return OK; }
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) { madvise((void*)pointer, size, MADV_DONTNEED); return OK; }
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return OK; }

// Everything that is asked by name and is not here does nothing.
CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  *function = strcmp(name, "cuGetProcAddress") ? dlsym(driver, name) : (void*)cuGetProcAddress_v2;
  if (!*function) *function = dlsym(driver, second);
  if (!*function) *function = (void*)do_nothing;
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return OK;
}
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
