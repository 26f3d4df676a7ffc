// The lock, the settings, and errors: those that calls return, and complaints about host code.
#include "stand_in.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

static std::recursive_mutex everything;

// Taken from the process, so that the library loads without a Python, too.
using HasInterpreter = int (*)();
using LeaveInterpreter = void *(*)();
using EnterInterpreter = void (*)(void *);

template <typename Function>
static Function find_in_process(const char *name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

Lock::Lock() {
  if (everything.try_lock()) return;
  static auto has_interpreter = find_in_process<HasInterpreter>("PyGILState_Check");
  static auto leave_interpreter = find_in_process<LeaveInterpreter>("PyEval_SaveThread");
  static auto enter_interpreter = find_in_process<EnterInterpreter>("PyEval_RestoreThread");
  void *left = nullptr;
  if (has_interpreter && has_interpreter()) left = leave_interpreter();
  everything.lock();
  if (left) enter_interpreter(left);
}

Lock::~Lock() { everything.unlock(); }

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

bool is_lazy() {
  static const bool lazy = *setting("CUDA_STAND_IN_LAZY", "0") == '1';
  return lazy;
}

size_t total_memory() {
  static const size_t bytes = strtoull(setting("CUDA_STAND_IN_MEMORY", "2147483648"), nullptr, 10);
  return bytes;
}

// A process on a GPU has less than all: its context and its kernels take memory, too.
size_t usable_memory() { return total_memory() - total_memory() / 64; }

EXPORTED int stand_in_capability() {
  static const int capability = atoi(setting("CUDA_STAND_IN_CAPABILITY", "90"));
  return capability;
}

// What host code did wrong, and a zero byte behind it. All processes of a run write into one file.
void complain(const std::string &what) {
  const std::string text = what + std::string("\0\n", 2);
  const char *path = setting("CUDA_STAND_IN_COMPLAINTS", "");
  int file = *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  ssize_t written = write(file >= 0 ? file : STDERR_FILENO, text.data(), text.size());
  if (written < 0) perror("stand-in for CUDA: a complaint is lost");
  if (file >= 0) close(file);
}

EXPORTED void stand_in_complain(const char *what) { complain(what); }

EXPORTED void stand_in_unimplemented(const char *call) {
  complain(std::string(call) + " is called, which the stand-in does not implement");
}

static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t lost = cudaSuccess;  // once work failed on the device every call fails, as on a GPU

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The error that all calls return since work failed on the device; cudaSuccess: none did.
cudaError_t lost_device() { return report(lost); }

EXPORTED void stand_in_fail(const char *what) {
  Lock lock;
  complain(what);
  lost = cudaErrorLaunchFailure;
}

cudaError_t cudaGetLastError() {
  cudaError_t error = lost != cudaSuccess ? lost : last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return lost != cudaSuccess ? lost : last_error; }

struct ErrorText {
  cudaError_t error;
  const char *name;
  const char *text;
};

// Texts are those of CUDA where Plait or torch read them.
static const ErrorText ERROR_TEXTS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

static const ErrorText *find_text(cudaError_t error) {
  for (const ErrorText &known : ERROR_TEXTS)
    if (known.error == error) return &known;
  return nullptr;
}

const char *cudaGetErrorName(cudaError_t error) {
  const ErrorText *known = find_text(error);
  return known ? known->name : "an error that the stand-in does not name";
}

const char *cudaGetErrorString(cudaError_t error) {
  const ErrorText *known = find_text(error);
  return known ? known->text : "an error that the stand-in does not name";
}
