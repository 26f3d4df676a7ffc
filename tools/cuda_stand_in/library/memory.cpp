// Memory: blocks of the device, pinned blocks of the host, and copies between them.
#include "stand_in.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

constexpr size_t PAGE = 4096;
constexpr size_t GUARD = 2 << 20;        // behind each device block: an access there ends the process
constexpr size_t MOST_FILLED = 1 << 28;  // larger blocks are zeros, which take no memory until they are used
constexpr int UNWRITTEN = 0xFF;          // NaN in every float format: it shows where no work has written
constexpr int UNWRITTEN_PINNED = 0xEE;

using Blocks = std::map<const char *, size_t>;  // first address -> bytes

static Blocks device_blocks;
static Blocks pinned_blocks;
static size_t in_use = 0;

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The block that an address lies in, or the end of `blocks`.
static Blocks::const_iterator find_block(const Blocks &blocks, const void *address) {
  auto found = blocks.upper_bound(static_cast<const char *>(address));
  if (found == blocks.begin()) return blocks.end();
  --found;
  return static_cast<const char *>(address) < found->first + found->second ? found : blocks.end();
}

bool is_device_memory(const void *address) {
  return find_block(device_blocks, address) != device_blocks.end();
}

static bool is_pinned(const void *address) {
  return find_block(pinned_blocks, address) != pinned_blocks.end();
}

static bool is_pageable(const void *address) { return !is_device_memory(address) && !is_pinned(address); }

size_t memory_in_use() { return in_use; }

EXPORTED int stand_in_find_block(void *address, void **first, size_t *bytes) {
  Lock lock;
  auto found = find_block(device_blocks, address);
  if (found == device_blocks.end()) return 0;
  if (first) *first = const_cast<char *>(found->first);
  if (bytes) *bytes = found->second;
  return 1;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  if (breaks_capture("cudaMalloc")) return report(cudaErrorStreamCaptureUnsupported);
  const size_t size = round_up(bytes, PAGE);
  if (in_use + size > usable_memory()) return report(cudaErrorMemoryAllocation);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *block = mmap(nullptr, size + GUARD, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (block == MAP_FAILED) return report(cudaErrorMemoryAllocation);
  mprotect(static_cast<char *>(block) + size, GUARD, PROT_NONE);
  if (size <= MOST_FILLED) memset(block, UNWRITTEN, size);
  device_blocks[static_cast<char *>(block)] = size;
  in_use += size;
  *address = block;
  return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
  Lock lock;
  if (!address) return cudaSuccess;
  if (cudaError_t error = lost_device()) return error;
  if (breaks_capture("cudaFree")) return report(cudaErrorStreamCaptureUnsupported);
  auto found = device_blocks.find(static_cast<char *>(address));
  if (found == device_blocks.end()) {
    complain("cudaFree is called for memory that is not allocated");
    return report(cudaErrorInvalidValue);
  }
  finish_all();
  in_use -= found->second;
  munmap(address, found->second + GUARD);
  device_blocks.erase(found);
  return lost_device();
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  Lock lock;
  *total_bytes = total_memory();
  *free_bytes = usable_memory() - in_use;
  return lost_device();
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
  Lock lock;
  if (cudaError_t error = lost_device()) return error;
  if (breaks_capture("cudaHostAlloc")) return report(cudaErrorStreamCaptureUnsupported);
  void *block = aligned_alloc(PAGE, round_up(bytes ? bytes : 1, PAGE));
  if (!block) return report(cudaErrorMemoryAllocation);
  memset(block, UNWRITTEN_PINNED, bytes);
  pinned_blocks[static_cast<char *>(block)] = bytes;
  *address = block;
  return cudaSuccess;
}

// Forgets a pinned block after all work that may copy from it.
static cudaError_t unpin(void *address, const char *call) {
  if (breaks_capture(call)) return report(cudaErrorStreamCaptureUnsupported);
  finish_all();
  if (pinned_blocks.erase(static_cast<char *>(address))) return cudaSuccess;
  complain(std::string(call) + " is called for memory that is not pinned");
  return report(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaFreeHost(void *address) {
  Lock lock;
  if (!address) return cudaSuccess;
  cudaError_t error = unpin(address, "cudaFreeHost");
  if (!error) free(address);
  return error;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned) {
  Lock lock;
  if (breaks_capture("cudaHostRegister")) return report(cudaErrorStreamCaptureUnsupported);
  pinned_blocks[static_cast<char *>(address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
  Lock lock;
  return unpin(address, "cudaHostUnregister");
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *address) {
  Lock lock;
  memset(found, 0, sizeof *found);
  if (is_device_memory(address)) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void *>(address);
  } else if (is_pinned(address)) {
    found->type = cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = const_cast<void *>(address);
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->device = cudaInvalidDeviceId;
    found->hostPointer = const_cast<void *>(address);
  }
  return cudaSuccess;
}

static void check_bounds(const void *address, size_t bytes, const char *call) {
  auto found = find_block(device_blocks, address);
  if (found == device_blocks.end()) return;
  const size_t offset = static_cast<const char *>(address) - found->first;
  if (offset + bytes > found->second) complain(std::string(call) + " goes beyond its block of device memory");
}

// From pageable memory the bytes are taken at once, and to pageable memory the host waits, as the driver does.
static cudaError_t copy(void *to, const void *from, size_t bytes, Stream *stream) {
  check_bounds(to, bytes, "a copy to the device");
  check_bounds(from, bytes, "a copy from the device");
  if (stream->capture && (is_pageable(from) || is_pageable(to)))
    return break_capture(
        stream->capture, "a copy of pageable memory is captured", cudaErrorStreamCaptureUnsupported);
  if (is_pageable(from)) {
    const char *first = static_cast<const char *>(from);
    auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
    return enqueue(stream, [=] { memcpy(to, staged->data(), bytes); });
  }
  if (cudaError_t error = enqueue(stream, [=] { memcpy(to, from, bytes); })) return error;
  if (is_pageable(to)) finish_stream(stream);
  return lost_device();
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  Lock lock;
  return copy(to, from, bytes, find_stream(stream));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  Lock lock;
  if (breaks_capture("cudaMemcpy")) return report(cudaErrorStreamCaptureUnsupported);
  Stream *stream = find_stream(nullptr);
  if (cudaError_t error = copy(to, from, bytes, stream)) return error;
  finish_stream(stream);
  return lost_device();
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
  Lock lock;
  check_bounds(address, bytes, "cudaMemsetAsync");
  return enqueue(find_stream(stream), [=] { memset(address, value, bytes); });
}

cudaError_t cudaMemset(void *address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}
