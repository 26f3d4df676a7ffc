// What the parts of the stand-in for CUDA's runtime share.
//
// Device memory is host memory. A stream is a queue of work, a graph is a list of work. Work runs in the thread
// that enqueues it, or, with CUDA_STAND_IN_LAZY=1, in the first thread that waits for it: host code that relies
// on work which it never waited for then reads old values.
//
// One lock guards everything here. Work that runs Python needs the interpreter's lock as well, so `Lock` gives
// that up while it waits for ours.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

using Work = std::function<void()>;
struct Graph;

struct Stream {
  unsigned flags = 0;
  std::deque<Work> queue;
  Graph *capture = nullptr;          // the graph that records this stream, or none
  bool has_unjoined_work = false;    // recorded work that no event has joined to another stream since
  int queries = 0;                   // since this stream was last found idle
};

struct Event {
  long issued = 0;                   // how often it was recorded
  long done = 0;                     // the last of those records that ran
  Stream *last = nullptr;            // the stream of the last record
  unsigned long long capture = 0;    // the number of the capture of the last record; 0: none
  bool is_timed = false;
  int queries = 0;                   // since the last record
};

struct Graph {
  std::vector<Work> work;
  Stream *origin = nullptr;          // the stream with which the capture began
  std::set<Stream *> streams;
  bool is_broken = false;            // a call that no capture may have invalidated it
  unsigned long long number = 0;     // of all captures, from 1
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  size_t thread = 0;                 // the thread that began it
};

class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock &) = delete;
  Lock &operator=(const Lock &) = delete;
};

// state.cpp: what a call returns, and what host code did wrong
bool is_lazy();
size_t total_memory();
size_t usable_memory();
void complain(const std::string &what);
cudaError_t report(cudaError_t error);
cudaError_t lost_device();

// memory.cpp
bool is_device_memory(const void *address);
size_t memory_in_use();

// streams.cpp
Stream *find_stream(cudaStream_t handle);
bool is_default(const Stream *stream);
bool is_blocking(const Stream *stream);
const std::set<Stream *> &created_streams();
cudaError_t enqueue(Stream *stream, Work work);
void finish_stream(Stream *stream);
void finish_event(Event *event, long record);
void finish_all();

// graphs.cpp
const std::set<Graph *> &current_captures();
Graph *find_capture(unsigned long long number);
bool breaks_capture(const char *call);
cudaError_t break_capture(Graph *capture, const std::string &what, cudaError_t error);
