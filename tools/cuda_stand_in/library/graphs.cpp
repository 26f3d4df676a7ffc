// Stream capture with its rules, and graphs as lists of work.
#include "stand_in.h"

#include <atomic>
#include <utility>

static std::set<Graph *> captures;
static unsigned long long num_captures = 0;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// The number of this thread, from 1.
static size_t this_thread() {
  static std::atomic<size_t> count{0};
  static thread_local const size_t mine = ++count;
  return mine;
}

const std::set<Graph *> &current_captures() { return captures; }

// The capture of that number while it is under way, or none.
Graph *find_capture(unsigned long long number) {
  for (Graph *capture : captures)
    if (capture->number == number) return capture;
  return nullptr;
}

cudaError_t break_capture(Graph *capture, const std::string &what, cudaError_t error) {
  complain(what);
  capture->is_broken = true;
  return report(error);
}

// Whether a call that may wait for the device is forbidden now, by the modes of captures and of this thread.
// It invalidates the capture that forbids it.
bool breaks_capture(const char *call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (Graph *capture : captures) {
    const bool is_mine = capture->thread == this_thread();
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (capture->mode == cudaStreamCaptureModeThreadLocal && !is_mine) continue;
    if (thread_mode == cudaStreamCaptureModeThreadLocal && !is_mine) continue;
    const std::string what = std::string(call) + " is called while a stream is captured";
    break_capture(capture, what, cudaErrorStreamCaptureUnsupported);
    return true;
  }
  return false;
}

EXPORTED int stand_in_breaks_capture(const char *call) {
  Lock lock;
  return breaks_capture(call);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  Stream *stream = find_stream(handle);
  if (is_default(stream)) return report(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return report(cudaErrorIllegalState);
  auto *capture = new Graph;
  capture->origin = stream;
  capture->streams.insert(stream);
  capture->number = ++num_captures;
  capture->mode = mode;
  capture->thread = this_thread();
  captures.insert(capture);
  stream->capture = capture;
  stream->has_unjoined_work = false;
  return cudaSuccess;
}

// Ends the capture of all its streams. Returns whether one has work that the first stream does not wait for.
static bool leave_capture(Graph *capture) {
  bool has_unjoined_work = false;
  for (Stream *stream : capture->streams) {
    if (stream != capture->origin && stream->has_unjoined_work) has_unjoined_work = true;
    stream->capture = nullptr;
    stream->has_unjoined_work = false;
  }
  captures.erase(capture);
  return has_unjoined_work;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  Lock lock;
  *graph = nullptr;
  Stream *stream = find_stream(handle);
  Graph *capture = stream->capture;
  if (!capture || capture->origin != stream) return report(cudaErrorIllegalState);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread()) {
    complain("a capture ends in another thread than the one that began it");
    return report(cudaErrorStreamCaptureWrongThread);
  }
  std::unique_ptr<Graph> captured(capture);
  const bool has_unjoined_work = leave_capture(capture);
  if (capture->is_broken) return report(cudaErrorStreamCaptureInvalidated);
  if (has_unjoined_work) {
    complain("a capture ends with work on another stream that it does not wait for");
    return report(cudaErrorStreamCaptureUnjoined);
  }
  *graph = reinterpret_cast<cudaGraph_t>(captured.release());
  return lost_device();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  Lock lock;
  const Stream *stream = find_stream(handle);
  if (is_default(stream))
    for (const Stream *other : created_streams())
      if (other->capture && is_blocking(other)) return report(cudaErrorStreamCaptureImplicit);
  *status = cudaStreamCaptureStatusNone;
  if (stream->capture)
    *status = stream->capture->is_broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *number, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *num_dependencies) {
  Lock lock;
  if (cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  Graph *capture = find_stream(handle)->capture;
  if (capture && number) *number = capture->number;
  if (capture && graph) *graph = reinterpret_cast<cudaGraph_t>(capture);
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (num_dependencies) *num_dependencies = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

// An executable graph has the work of its graph, which reads and writes the same addresses in each run.
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
  Lock lock;
  auto *work = new std::vector<Work>(reinterpret_cast<Graph *>(graph)->work);
  *executable = reinterpret_cast<cudaGraphExec_t>(work);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  Lock lock;
  Stream *stream = find_stream(handle);
  if (stream->capture)
    return break_capture(
        stream->capture, "a graph is launched in a captured stream", cudaErrorStreamCaptureUnsupported);
  for (const Work &work : *reinterpret_cast<std::vector<Work> *>(executable))
    if (cudaError_t error = enqueue(stream, work)) return error;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Lock lock;
  delete reinterpret_cast<Graph *>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  Lock lock;
  delete reinterpret_cast<std::vector<Work> *>(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  Lock lock;
  if (nodes) return report(cudaErrorNotSupported);
  *count = reinterpret_cast<Graph *>(graph)->work.size();
  return cudaSuccess;
}
