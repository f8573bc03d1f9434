// libcudart of the stand-in: an H100 whose kernels do nothing. Its memory is the host's, mapped without being reserved,
// so that 80 GB of it cost what is written.
//
// Real with it: torch's host code, its allocator, its checks for host waits, Inductor, Triton and ptxas. Copies and small
// fills are done, at once; streams have no order to keep. It proves no number that a kernel would compute, and no time.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>

namespace {

constexpr size_t kMemory = 84929347584;     // what an H100 of 80 GB says it has
constexpr size_t kUsable = 84000000000;     // less a context
constexpr size_t kLarge = 1 << 20;          // fills and copies on the device of more than that are left out

enum Kind { kUnknown, kPinned, kDevice };

struct Range {
  size_t size;
  Kind kind;
  int device;
};

std::mutex mutex;
auto* ranges = new std::map<char*, Range>();  // never destroyed: torch frees memory after static objects are gone
std::map<int, size_t> used;                   // by device, in this process
thread_local int current;

// Ranks of one test share one program, not its memory: a device's memory is counted in each process alone.
void* map_memory(size_t size) {
  void* start = mmap(nullptr, std::max<size_t>(size, 4096), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

Range find(const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto next = ranges->upper_bound((char*)pointer);
  if (next == ranges->begin()) return {};
  auto& [start, range] = *--next;
  return (char*)pointer < start + range.size ? range : Range{};
}

void forget(void* pointer, bool unmap) {
  std::lock_guard<std::mutex> guard(mutex);
  auto entry = ranges->find((char*)pointer);
  if (entry == ranges->end()) return;
  Range range = entry->second;
  ranges->erase(entry);
  if (!unmap) return;
  if (range.kind == kDevice) used[range.device] -= range.size;
  munmap(pointer, std::max<size_t>(range.size, 4096));
}

double milliseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

// An event holds the host's time of its record: elapsed times are the host's.
double& time_of(cudaEvent_t event) { return *(double*)event; }

int do_nothing() { return 0; }

}  // namespace

#define OK cudaSuccess
extern "C" {

// For driver.cpp.
int standin_devices() {
  const char* number = getenv("STANDIN_DEVICES");
  return number ? atoi(number) : 1;
}

int standin_device() { return current; }

bool standin_take(size_t size) {
  std::lock_guard<std::mutex> guard(mutex);
  if (used[current] + size > kUsable) return false;
  used[current] += size;
  return true;
}

void standin_give(size_t size) {
  std::lock_guard<std::mutex> guard(mutex);
  used[current] -= size;
}

void standin_add(void* start, size_t size, int kind) {
  std::lock_guard<std::mutex> guard(mutex);
  (*ranges)[(char*)start] = {size, (Kind)kind, current};
}

// Attributes of both interfaces have the same numbers. What is not here is 1.
int standin_attribute(int name, int device) {
  switch (name) {
    case 1: return 1024;        // threads of a block
    case 5: return 2147483647;  // blocks of a grid, x
    case 6: case 7: return 65535;
    case 8: return 49152;       // shared memory of a block
    case 10: return 32;         // threads of a warp
    case 12: return 65536;      // registers of a block
    case 13: return 1980000;    // clock, kHz
    case 16: return 132;        // multiprocessors
    case 33: return 1 + device; // PCI bus
    case 34: case 50: return 0; // PCI slot and domain
    case 36: return 2619000;    // memory clock, kHz
    case 37: return 5120;       // memory bus, bits
    case 38: return 52428800;   // L2 cache
    case 39: return 2048;       // threads of a multiprocessor
    case 75: return 9;          // compute capability 9.0
    case 76: return 0;
    case 81: return 233472;     // shared memory of a multiprocessor
    case 82: return 65536;      // registers of a multiprocessor
    case 97: return 232448;     // shared memory of a block that asks for it
    case 106: return 32;        // blocks of a multiprocessor
    default: return 1;
  }
}

// The device
cudaError_t cudaGetDeviceCount(int* number) { *number = standin_devices(); return OK; }
cudaError_t cudaGetDevice(int* device) { *device = current; return OK; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= standin_devices()) return cudaErrorInvalidDevice;
  current = device;
  return OK;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "stand-in"; }
const char* cudaGetErrorName(cudaError_t) { return "stand-in"; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return OK; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return OK; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int device) {
  *value = standin_attribute(name, device);
  return OK;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int number) {
  memset(device, 0, sizeof *device);
  strcpy(device->name, "NVIDIA H100 80GB HBM3");
  memset(&device->uuid, 1 + number, sizeof device->uuid);
  device->totalGlobalMem = kMemory;
  device->sharedMemPerBlock = 49152;
  device->sharedMemPerBlockOptin = 232448;
  device->sharedMemPerMultiprocessor = 233472;
  device->reservedSharedMemPerBlock = 1024;
  device->regsPerBlock = device->regsPerMultiprocessor = 65536;
  device->warpSize = 32;
  device->maxThreadsPerBlock = device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = device->maxGridSize[2] = 65535;
  device->maxThreadsPerMultiProcessor = 2048;
  device->maxBlocksPerMultiProcessor = 32;
  device->multiProcessorCount = 132;
  device->totalConstMem = 65536;
  device->textureAlignment = 512;
  device->l2CacheSize = 52428800;
  device->memoryBusWidth = 5120;
  device->asyncEngineCount = 3;
  device->major = 9;
  device->pciBusID = 1 + number;
  device->concurrentKernels = device->ECCEnabled = device->unifiedAddressing = 1;
  device->managedMemory = device->cooperativeLaunch = 1;
  return OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return OK; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return OK; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", 1 + device);
  return OK;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> guard(mutex);
  *total = kMemory;
  *free = kUsable - used[current];
  return OK;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  char second[128];
  snprintf(second, sizeof second, "%s_v2", name);
  *function = dlsym(driver, second);
  if (!*function) *function = dlsym(driver, name);
  if (!*function) *function = (void*)do_nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return OK;
}

// Memory
cudaError_t cudaMalloc(void** pointer, size_t size) {
  *pointer = nullptr;
  if (!standin_take(size)) return cudaErrorMemoryAllocation;
  *pointer = map_memory(size);
  standin_add(*pointer, size, kDevice);
  return OK;
}
cudaError_t cudaFree(void* pointer) { forget(pointer, true); return OK; }
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  *pointer = map_memory(size);
  standin_add(*pointer, size, kPinned);
  return OK;
}
cudaError_t cudaFreeHost(void* pointer) { forget(pointer, true); return OK; }
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) { standin_add(pointer, size, kPinned); return OK; }
cudaError_t cudaHostUnregister(void* pointer) { forget(pointer, false); return OK; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return OK; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Range range = find(pointer);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = range.kind == kDevice   ? cudaMemoryTypeDevice
                     : range.kind == kPinned ? cudaMemoryTypeHost
                                             : cudaMemoryTypeUnregistered;
  attributes->device = range.device;
  attributes->devicePointer = attributes->hostPointer = (void*)pointer;
  return OK;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (size > kLarge && find(to).kind == kDevice && find(from).kind == kDevice) return OK;
  memcpy(to, from, size);
  return OK;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  return cudaMemcpy(to, from, size, cudaMemcpyDefault);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++) memcpy((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
  return OK;
}
cudaError_t cudaMemset(void* start, int value, size_t size) {
  if (size < kLarge) memset(start, value, size);
  return OK;
}
cudaError_t cudaMemsetAsync(void* start, int value, size_t size, cudaStream_t) { return cudaMemset(start, value, size); }
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char symbol[65536];
  *pointer = symbol;
  return OK;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = (cudaMemPool_t)0x10; return OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) { *(size_t*)value = 0; return OK; }

// Streams and events
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static std::atomic<long> last{0x1000};
  *stream = (cudaStream_t)(last += 16);
  return OK;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { function(data); return OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, OK, data);
  return OK;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { *event = (cudaEvent_t) new double(0); return OK; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (double*)event; return OK; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { time_of(event) = milliseconds(); return OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t from, cudaEvent_t to) {
  *elapsed = time_of(to) - time_of(from);
  return OK;
}

// Kernels
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return OK; }
void** __cudaRegisterFatBinary(void*) {
  static void* binary[4];
  return binary;
}
char __cudaInitModule(void**) { return 1; }
}
