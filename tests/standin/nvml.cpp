// NVML of the stand-in: how many devices there are, which nobody else uses, without links between them.
#include <cstdlib>

extern "C" {

enum { kSuccess, kNotSupported = 3 };

int nvmlInit() { return kSuccess; }
int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
int nvmlDeviceGetCount_v2(int* number) {
  const char* devices = getenv("STANDIN_DEVICES");
  *number = devices ? atoi(devices) : 1;
  return kSuccess;
}
int nvmlDeviceGetCount(int* number) { return nvmlDeviceGetCount_v2(number); }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = (void*)0x10; return kSuccess; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* number, void*) { *number = 0; return kSuccess; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return kSuccess; }
const char* nvmlErrorString(int) { return "stand-in"; }
}
