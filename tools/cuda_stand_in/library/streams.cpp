// Streams as queues of work, and events as places in them.
#include "stand_in.h"

#include <map>

constexpr int QUERIES = 3;  // a query finds work done the third time: a loop that polls ends, and has to poll

static Stream default_stream;
static std::set<Stream *> streams;
static std::map<cudaEvent_t, std::shared_ptr<Event>> events;  // queued work shares an event that was destroyed

bool is_default(const Stream *stream) { return stream == &default_stream; }

const std::set<Stream *> &created_streams() { return streams; }

bool is_blocking(const Stream *stream) { return !(stream->flags & cudaStreamNonBlocking); }

Stream *find_stream(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return &default_stream;
  auto *stream = reinterpret_cast<Stream *>(handle);
  if (streams.count(stream)) return stream;
  complain("a stream is used that was destroyed, or never created");
  return &default_stream;
}

static std::shared_ptr<Event> find_event(cudaEvent_t handle) {
  auto found = events.find(handle);
  if (found != events.end()) return found->second;
  complain("an event is used that was destroyed, or never created");
  return std::make_shared<Event>();
}

static void run_first(Stream *stream) {
  Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  work();
}

void finish_stream(Stream *stream) {
  while (!stream->queue.empty()) run_first(stream);
  stream->queries = 0;
}

// Runs the stream of the event up to that record of it.
void finish_event(Event *event, long record) {
  while (event->done < record && !event->last->queue.empty()) run_first(event->last);
}

void finish_all() {
  finish_stream(&default_stream);
  const std::set<Stream *> now = streams;
  for (Stream *stream : now) finish_stream(stream);
}

// The default stream and blocking streams wait for each other.
static void finish_legacy_order(Stream *stream) {
  if (!is_default(stream)) {
    if (is_blocking(stream)) finish_stream(&default_stream);
    return;
  }
  const std::set<Stream *> now = streams;
  for (Stream *other : now)
    if (is_blocking(other)) finish_stream(other);
}

static bool is_blocking_stream_captured() {
  for (Stream *stream : streams)
    if (stream->capture && is_blocking(stream)) return true;
  return false;
}

// Work goes into the capture of the stream, or into its queue; it runs at once unless the stand-in is lazy.
cudaError_t enqueue(Stream *stream, Work work) {
  if (cudaError_t error = lost_device()) return error;
  if (Graph *capture = stream->capture) {
    if (capture->is_broken) return report(cudaErrorStreamCaptureInvalidated);
    stream->has_unjoined_work = true;
    capture->work.push_back(std::move(work));
    return cudaSuccess;
  }
  if (is_default(stream) && is_blocking_stream_captured()) {
    complain("the default stream is used while a blocking stream is captured");
    return report(cudaErrorStreamCaptureImplicit);
  }
  finish_legacy_order(stream);
  stream->queue.push_back(std::move(work));
  if (!is_lazy()) finish_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  auto *stream = new Stream;
  stream->flags = flags;
  streams.insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

// The object stays, because events name the stream of their last record.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Lock lock;
  Stream *stream = find_stream(handle);
  finish_stream(stream);
  streams.erase(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  Stream *stream = find_stream(handle);
  if (stream->capture)
    return break_capture(
        stream->capture, "cudaStreamSynchronize is called for a captured stream",
        cudaErrorStreamCaptureUnsupported);
  if (breaks_capture("cudaStreamSynchronize")) return report(cudaErrorStreamCaptureUnsupported);
  finish_stream(stream);
  return lost_device();
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  Stream *stream = find_stream(handle);
  if (stream->capture)
    return break_capture(
        stream->capture, "cudaStreamQuery is called for a captured stream", cudaErrorStreamCaptureUnsupported);
  if (breaks_capture("cudaStreamQuery")) return report(cudaErrorStreamCaptureUnsupported);
  if (!stream->queue.empty() && ++stream->queries < QUERIES) return report(cudaErrorNotReady);
  finish_stream(stream);
  return lost_device();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
  Lock lock;
  return enqueue(find_stream(handle), [=] { function(argument); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
  Lock lock;
  auto event = std::make_shared<Event>();
  event->is_timed = !(flags & cudaEventDisableTiming);
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  events[*handle] = event;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Lock lock;
  events.erase(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  std::shared_ptr<Event> event = find_event(handle);
  Stream *stream = find_stream(stream_handle);
  event->queries = 0;
  event->last = stream;
  event->capture = stream->capture ? stream->capture->number : 0;
  if (stream->capture)
    return stream->capture->is_broken ? report(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
  const long record = ++event->issued;
  return enqueue(stream, [=] {
    if (event->done < record) event->done = record;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

// What a wait of the host for an event has to refuse; cudaSuccess: it may wait.
static cudaError_t check_host_wait(const Event &event, const char *call) {
  if (cudaError_t error = lost_device()) return error;
  if (Graph *capture = find_capture(event.capture))
    return break_capture(
        capture, std::string(call) + " is called for an event of a capture", cudaErrorCapturedEvent);
  return breaks_capture(call) ? report(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Lock lock;
  std::shared_ptr<Event> event = find_event(handle);
  if (cudaError_t error = check_host_wait(*event, "cudaEventQuery")) return error;
  if (event->done < event->issued && ++event->queries < QUERIES) return report(cudaErrorNotReady);
  finish_event(event.get(), event->issued);
  return lost_device();
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock;
  std::shared_ptr<Event> event = find_event(handle);
  if (cudaError_t error = check_host_wait(*event, "cudaEventSynchronize")) return error;
  finish_event(event.get(), event->issued);
  return lost_device();
}

// A millisecond always: the stand-in measures nothing.
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Lock lock;
  for (cudaEvent_t handle : {begin, end}) {
    std::shared_ptr<Event> event = find_event(handle);
    if (!event->is_timed || !event->issued) return report(cudaErrorInvalidResourceHandle);
    if (event->done < event->issued) return report(cudaErrorNotReady);
  }
  *milliseconds = 1.0f;
  return cudaSuccess;
}

// A stream that waits for an event of a capture joins that capture.
static cudaError_t join_capture(Stream *stream, const Event &event, Graph *capture) {
  if (stream->capture && stream->capture != capture) {
    complain("a captured stream waits for an event of another capture");
    return report(cudaErrorStreamCaptureMerge);
  }
  if (!stream->capture && is_default(stream))
    return break_capture(
        capture, "the default stream waits for an event of a capture", cudaErrorStreamCaptureImplicit);
  stream->capture = capture;
  capture->streams.insert(stream);
  if (event.last == stream) return cudaSuccess;
  event.last->has_unjoined_work = false;
  stream->has_unjoined_work = true;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  std::shared_ptr<Event> event = find_event(handle);
  Stream *stream = find_stream(stream_handle);
  if (Graph *capture = find_capture(event->capture)) return join_capture(stream, *event, capture);
  if (stream->capture) {
    if (!event->issued) return cudaSuccess;  // an event without a record is done
    return break_capture(
        stream->capture, "a captured stream waits for an event outside of the capture",
        cudaErrorStreamCaptureIsolation);
  }
  const long record = event->issued;
  if (event->done >= record) return cudaSuccess;
  return enqueue(stream, [=] { finish_event(event.get(), record); });
}
