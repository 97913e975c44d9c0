// What only tests call of the stand-in of the GPU runtime; see fake_gpu.cpp.

#include "fake_runtime.h"

using namespace fake;

/// What is in the stream waits so long.
EXPORT int fakeDelay(void* stream_handle, long microseconds) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  stream->enqueue([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
  return kSuccess;
}
/// The stream stops here until `fakeRelease`. One hold at a time.
EXPORT int fakeHold(void* stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  stream->held = true;
  stream->enqueue([raw = stream.get()] { Stream::pass(raw->held); });
  return kSuccess;
}
EXPORT int fakeRelease(void* stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return kInvalidHandle;
  stream->held = false;
  return kSuccess;
}
/// Whether streams of the package stop before what writes to device memory.
EXPORT void fakeHoldWrites(int held) { Stream::writes_are_held() = held != 0; }
/// Whether queries of events block.
EXPORT void fakeHoldQueries(int held) { queries().held = held != 0; }
/// Whether questions about an address or about the capture of a stream block.
EXPORT void fakeHoldLooks(int held) { looks().held = held != 0; }
/// Threads that a query of an event blocks.
EXPORT long fakeHeldQueries() { return queries().n_held; }
/// Calls of this process that are waiting for a stream to end, or for all of a device.
EXPORT long fakeDrains() { return n_drains(); }
EXPORT long fakeCrossed() { return n_crossed(); }
EXPORT long fakeLongestCopy() { return longest_copy().exchange(0); }
/// Calls so far that pin memory, allocate device memory and wait for a stream.
EXPORT void fakeSlowCalls(long* out) {
  out[0] = n_pinned();
  out[1] = n_allocated();
  out[2] = n_synchronized();
}
/// Returns once all streams have done what they can without a release or another process.
EXPORT void fakeRunUnblocked() {
  while (true) {
    const unsigned long before = n_steps();
    bool settled = true;
    for (auto& stream : all_streams()) settled = settled && (stream->idle() || stream->stuck());
    if (settled && n_steps() == before) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}
/// The device has failed for good, as after an illegal access; 0: it is well again.
EXPORT void fakeFail(int code) { sticky_error() = code; }
/// From here on the process ends where it has a context of another device; -1: of none.
EXPORT void fakeOnlyDevice(int device) {
  contexts().only = device;
  for (int other = 0; device >= 0 && other < kMostDevices; ++other) {
    if (contexts().exist[other]) make_context(other);
  }
}
/// Blocks of device and pinned memory that exist, streams and events: to find leaks.
EXPORT void fakeCounts(long* out) {
  const std::lock_guard lock(world().mutex);
  out[0] = out[1] = 0;
  for (const auto& [_, block] : world().blocks) ++out[block.device < 0 ? 1 : 0];
  out[2] = static_cast<long>(world().streams.size());
  out[3] = static_cast<long>(world().events.size());
}
/// What this process has asked for: blocks of memory, streams, events, and waits of the host for streams.
EXPORT void fakeMade(long* out) {
  out[0] = made().blocks;
  out[1] = made().streams;
  out[2] = made().events;
  out[3] = made().waits;
}
