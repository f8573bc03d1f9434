// cuBLAS, cuDNN and NCCL of the stand-in: what torch reads from them. Products, attention and collectives do nothing.
#include <cublasLt.h>
#include <cudnn.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>

template <class Handle>
static int create(Handle* handle) {
  *handle = (Handle)calloc(1, 4096);
  return 0;
}

#define CREATE(status, handle) return (status)create(handle)

extern "C" {

// cuBLAS
cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { CREATE(cublasStatus_t, handle); }
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) { *mode = CUBLAS_DEFAULT_MATH; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { CREATE(cublasStatus_t, handle); }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* descriptor, cublasComputeType_t, cudaDataType_t) {
  CREATE(cublasStatus_t, descriptor);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) { CREATE(cublasStatus_t, preference); }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType, uint64_t, uint64_t, int64_t) {
  CREATE(cublasStatus_t, layout);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* result,
                                              int* number) {
  memset(result, 0, sizeof *result);
  *number = 1;
  return CUBLAS_STATUS_SUCCESS;
}

// cuDNN: a graph has one engine, which needs no workspace
size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return 13000; }
const char* cudnnGetErrorString(cudnnStatus_t) { return "stand-in"; }
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { CREATE(cudnnStatus_t, handle); }
cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) { *stream = nullptr; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* descriptor) {
  CREATE(cudnnStatus_t, descriptor);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  free(descriptor);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t, int64_t* number, void* values) {
  bool is_list = name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE || name == CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE ||
                 name == CUDNN_ATTR_ENGINE_KNOB_INFO || name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES;
  if (number) *number = is_list ? 0 : 1;
  if (!values || is_list) return CUDNN_STATUS_SUCCESS;
  if (type == CUDNN_TYPE_INT64) *(int64_t*)values = 0;
  if (type == CUDNN_TYPE_INT32) *(int32_t*)values = 0;
  return CUDNN_STATUS_SUCCESS;
}

// NCCL: a communicator knows its size and its rank. Nothing is sent: a gather and a broadcast give each rank its own data,
// as if all ranks had the same; DDP compares sizes in this way. Sums are left as they are.
struct ncclComm {
  int ranks, rank;
};
static ncclResult_t communicator(ncclComm_t* result, int ranks, int rank) {
  create(result);
  **result = {ranks, rank};
  return ncclSuccess;
}
ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { memset(id, 1, sizeof *id); return ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t* result, int ranks, ncclUniqueId, int rank) {
  return communicator(result, ranks, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int ranks, ncclUniqueId, int rank, ncclConfig_t*) {
  return communicator(result, ranks, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t, int, int rank, ncclComm_t* result, ncclConfig_t*) {
  return communicator(result, rank + 1, rank);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* number) { *number = comm->ranks; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
static size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}
static ncclResult_t copy(const void* from, void* to, size_t size) {
  if (from != to) cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice);
  return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t number, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
  size_t size = number * width(type);
  for (int rank = 0; rank < comm->ranks; rank++) copy(from, (char*)to + rank * size, size);
  return ncclSuccess;
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t number, ncclDataType_t type, int, ncclComm_t, cudaStream_t) {
  return copy(from, to, number * width(type));
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { *error = ncclSuccess; return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "stand-in"; }
const char* ncclGetLastError(ncclComm_t) { return "stand-in"; }
}
