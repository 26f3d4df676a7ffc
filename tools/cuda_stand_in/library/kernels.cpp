// Kernels: those of Python, which the stand-in runs, and torch's own machine code, which it refuses.
#include "stand_in.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>

constexpr size_t MOST_CHARACTERS = 200;  // of a name: those of torch's kernels are long

EXPORTED int stand_in_capability();

using PythonCallback = void (*)(long);
static PythonCallback run_in_python = nullptr;
static PythonCallback release_in_python = nullptr;

// A call that Python knows by a number, until no queue and no graph has it.
struct PythonCall {
  long number;
  explicit PythonCall(long given) : number(given) {}
  ~PythonCall() {
    if (release_in_python) release_in_python(number);
  }
};

EXPORTED void stand_in_set_callbacks(PythonCallback run, PythonCallback release) {
  Lock lock;
  run_in_python = run;
  release_in_python = release;
}

EXPORTED int stand_in_enqueue(void *handle, long number) {
  Lock lock;
  auto call = std::make_shared<PythonCall>(number);
  return enqueue(find_stream(static_cast<cudaStream_t>(handle)), [call] {
    if (run_in_python) run_in_python(call->number);
  });
}

EXPORTED int stand_in_is_captured(void *handle) {
  Lock lock;
  return find_stream(static_cast<cudaStream_t>(handle))->capture != nullptr;
}

// The host waits for a stream, because the shape of a result depends on values.
EXPORTED int stand_in_wait(void *handle, const char *operation) {
  Lock lock;
  Stream *stream = find_stream(static_cast<cudaStream_t>(handle));
  if (stream->capture)
    return break_capture(
        stream->capture, std::string(operation) + " reads values on the host in a capture",
        cudaErrorStreamCaptureUnsupported);
  finish_stream(stream);
  return lost_device();
}

// What nvcc's code in torch calls when a library is loaded. The names serve the complaint.
static std::map<const void *, std::string> names;

EXPORTED void **__cudaRegisterFatBinary(void *) {
  static void *handle[1];
  return handle;
}

EXPORTED void __cudaRegisterFatBinaryEnd(void **) {}

EXPORTED void __cudaUnregisterFatBinary(void **) {}

EXPORTED char __cudaInitModule(void **) { return 1; }

EXPORTED void __cudaRegisterFunction(
    void **, const char *function, char *, const char *name, int, void *, void *, void *, void *, int *) {
  names[function] = name;
}

EXPORTED void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

static std::string readable(const std::string &name) {
  char *found = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const std::string text = std::string(found ? found : name).substr(0, MOST_CHARACTERS);
  free(found);
  return text;
}

static cudaError_t refuse(const void *function) {
  Lock lock;
  auto found = names.find(function);
  complain("torch launches a kernel of its own: " + (found == names.end() ? "?" : readable(found->second)));
  return report(cudaErrorNotSupported);
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse(kernel);
}

cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
  return refuse(function);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) {
  return refuse(function);
}

struct LaunchSize {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  void *stream;
};

static thread_local std::vector<LaunchSize> sizes;

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
  sizes.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  const LaunchSize size = sizes.back();
  sizes.pop_back();
  *grid = size.grid;
  *block = size.block;
  *shared_bytes = size.shared_bytes;
  *static_cast<void **>(stream) = size.stream;
  return cudaSuccess;
}

// Torch takes the driver's functions from here. It asks for the newest version of each.
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *result) {
  static void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, (std::string(name) + "_v2").c_str()) : nullptr;
  if (!*function && driver) *function = dlsym(driver, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : report(cudaErrorSymbolNotFound);
}
