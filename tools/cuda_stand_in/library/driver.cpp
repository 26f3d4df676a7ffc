// A stand-in for CUDA's driver: as much of it as torch and Triton's launcher call.
//
// A launch is checked against what a device allows. It computes nothing: the launch of the same kernel in
// Triton's interpreter is enqueued apart from it.
#include <cuda.h>

#include <cstring>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern "C" {
void stand_in_complain(const char *what);
void stand_in_unimplemented(const char *call);
int stand_in_breaks_capture(const char *call);
int stand_in_find_block(void *address, void **first, size_t *bytes);
int cudaDriverGetVersion(int *version);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
}

constexpr int SHARED_MEMORY = 49152;  // of a kernel that demands no more
constexpr int REGISTERS = 128;        // of each thread: Triton reports them, and nothing depends on them
constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned LARGEST_GRID = 65535;  // along y and z

struct Kernel {
  std::string name;
  unsigned shared_bytes = SHARED_MEMORY;
};

static CUcontext context() {
  static char only;
  return reinterpret_cast<CUcontext>(&only);
}

EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORTED CUresult cuDriverGetVersion(int *version) {
  return static_cast<CUresult>(cudaDriverGetVersion(version));
}

EXPORTED CUresult cuGetErrorString(CUresult error, const char **text) {
  static thread_local std::string last;
  last = "error " + std::to_string(error) + " of the stand-in for CUDA's driver";
  *text = last.c_str();
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

EXPORTED CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return number == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORTED CUresult cuDeviceGetCount(int *count) {
  *count = 1;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, attribute, device));
}

EXPORTED CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice) {
  memset(uuid, 7, sizeof *uuid);
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice) {
  *found = context();
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext *found) {
  *found = context();
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

EXPORTED CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (stand_in_breaks_capture("cuModuleLoadData")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (memcmp(image, "\177ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  *module = static_cast<CUmodule>(const_cast<void *>(image));
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORTED CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  *function = reinterpret_cast<CUfunction>(new Kernel{name});  // Triton keeps it as long as the process runs
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
  *value = 0;
  if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = REGISTERS;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = MOST_THREADS;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORTED CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    reinterpret_cast<Kernel *>(function)->shared_bytes = value;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig *size, CUfunction function, void **, void **) {
  const auto *kernel = reinterpret_cast<Kernel *>(function);
  const bool is_empty = !size->gridDimX || !size->gridDimY || !size->gridDimZ;
  const bool is_large = size->gridDimY > LARGEST_GRID || size->gridDimZ > LARGEST_GRID;
  const bool has_many = size->blockDimX * size->blockDimY * size->blockDimZ > MOST_THREADS;
  if (!is_empty && !is_large && !has_many && size->sharedMemBytes <= kernel->shared_bytes) return CUDA_SUCCESS;
  std::string grid;
  for (unsigned along : {size->gridDimX, size->gridDimY, size->gridDimZ}) grid += std::to_string(along) + " ";
  stand_in_complain(("the launch of " + kernel->name + " is too large: grid " + grid + "with " +
                     std::to_string(size->sharedMemBytes) + " bytes of shared memory of at most " +
                     std::to_string(kernel->shared_bytes)).c_str());
  return CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    stand_in_unimplemented("cuPointerGetAttribute of another attribute");
    return CUDA_ERROR_INVALID_VALUE;
  }
  *static_cast<CUdeviceptr *>(value) = address;
  const bool is_device = stand_in_find_block(reinterpret_cast<void *>(address), nullptr, nullptr);
  return is_device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult cuMemGetAddressRange_v2(CUdeviceptr *first, size_t *bytes, CUdeviceptr address) {
  void *block = nullptr;
  if (!stand_in_find_block(reinterpret_cast<void *>(address), &block, bytes)) return CUDA_ERROR_INVALID_VALUE;
  *first = reinterpret_cast<CUdeviceptr>(block);
  return CUDA_SUCCESS;
}

// Triton loads this one by name; nothing of Plait demands it.
EXPORTED CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction, const CUlaunchConfig *) {
  *count = 1;
  return CUDA_SUCCESS;
}
