// The one device: its properties, and waiting for all of its work.
#include "stand_in.h"

#include <cstdio>
#include <cstring>

EXPORTED int stand_in_capability();

constexpr int DRIVER_VERSION = CUDART_VERSION / 1000 * 1000;
constexpr int NUM_MULTIPROCESSORS = 132;
constexpr int SHARED_MEMORY = 49152;                  // of a block that demands no more
constexpr int SHARED_MEMORY_OF_MULTIPROCESSOR = 233472;
constexpr int L2_BYTES = 50 << 20;
constexpr int MEMORY_BUS_BITS = 5120;
constexpr int CLOCK_KHZ = 1980000;
constexpr int MEMORY_CLOCK_KHZ = 2619000;

// The most shared memory that a block may demand, as NVIDIA's programming guide has it for each capability.
static int most_shared_memory() {
  switch (stand_in_capability()) {
    case 75: return 65536;
    case 80: return 166912;
    case 90:
    case 100: return 232448;
    default: return 101376;
  }
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : report(cudaErrorInvalidDevice); }

cudaError_t cudaDriverGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return cudaSuccess;
}

// The name is no real chip's: verdicts of trials are kept by it, and must not hold for a GPU.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "stand-in for sm_%d", stand_in_capability());
  memset(&found->uuid, 7, sizeof found->uuid);
  found->major = stand_in_capability() / 10;
  found->minor = stand_in_capability() % 10;
  found->totalGlobalMem = total_memory();
  found->totalConstMem = 65536;
  found->sharedMemPerBlock = SHARED_MEMORY;
  found->sharedMemPerBlockOptin = most_shared_memory();
  found->sharedMemPerMultiprocessor = SHARED_MEMORY_OF_MULTIPROCESSOR;
  found->regsPerBlock = 65536;
  found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->multiProcessorCount = NUM_MULTIPROCESSORS;
  found->l2CacheSize = L2_BYTES;
  found->memoryBusWidth = MEMORY_BUS_BITS;
  found->pciBusID = 1;
  found->canMapHostMemory = found->unifiedAddressing = found->concurrentKernels = 1;
  return cudaSuccess;
}

constexpr int UNKNOWN = -1;

static int find_attribute(cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return SHARED_MEMORY;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return most_shared_memory();
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_MEMORY_OF_MULTIPROCESSOR;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMultiProcessorCount: return NUM_MULTIPROCESSORS;
    case cudaDevAttrClockRate: return CLOCK_KHZ;
    case cudaDevAttrMemoryClockRate: return MEMORY_CLOCK_KHZ;
    case cudaDevAttrGlobalMemoryBusWidth: return MEMORY_BUS_BITS;
    case cudaDevAttrL2CacheSize: return L2_BYTES;
    case cudaDevAttrComputeMode: return cudaComputeModeDefault;
    case cudaDevAttrComputeCapabilityMajor: return stand_in_capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return stand_in_capability() % 10;
    default: return UNKNOWN;
  }
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return report(cudaErrorInvalidDevice);
  const int found = find_attribute(attribute);
  if (found == UNKNOWN) {
    complain("device attribute " + std::to_string(attribute) + " is read, which the stand-in does not have");
    return report(cudaErrorInvalidValue);
  }
  *value = found;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int) {
  snprintf(text, size, "0000:01:00.0");
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  if (breaks_capture("cudaDeviceSynchronize")) return report(cudaErrorStreamCaptureUnsupported);
  if (!current_captures().empty()) {
    complain("cudaDeviceSynchronize is called while a stream is captured");
    return report(cudaErrorStreamCaptureUnsupported);
  }
  finish_all();
  return lost_device();
}

EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }

EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }
