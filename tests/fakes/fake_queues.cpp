// Streams, events and graphs of the stand-in of the GPU runtime; see fake_gpu.cpp.

#include <algorithm>

#include "fake_runtime.h"

namespace fake {
namespace {

using StreamPtr = std::shared_ptr<Stream>;
using CapturePtr = std::shared_ptr<Capture>;

/// Whether work of the legacy stream would have to wait for a stream that is being captured. Requires the mutex of
/// captures() held.
CapturePtr in_the_way_of_legacy(int device) {
  for (const CapturePtr& capture : captures().active) {
    if (!capture->origin->of_library && capture->origin->device == device) return capture;
  }
  return nullptr;
}

/// Lets `stream` wait for what the others have so far, where one of them is the legacy stream and the other was made
/// without flags.
void wait_implicitly(const StreamPtr& stream) {
  if (stream->of_library) return;
  for (const StreamPtr& other : all_streams()) {
    if (other == stream || other->of_library || other->device != stream->device) continue;
    if (!other->is_legacy && !stream->is_legacy) continue;
    if (other->idle()) continue;
    stream->enqueue([other, number = other->put_so_far()] { other->wait_until_done(number); });
  }
}

}  // namespace

int submit(const StreamPtr& stream, std::function<void()> work, bool writes) {
  {
    const std::lock_guard lock(captures().mutex);
    if (const CapturePtr& capture = stream->capture) {
      if (capture->invalid) return kCaptureInvalidated;
      capture->nodes.push_back({std::move(work), writes});
      ++capture->n_gotten[stream.get()];
      return kSuccess;
    }
    const CapturePtr in_the_way = stream->is_legacy ? in_the_way_of_legacy(stream->device) : nullptr;
    if (in_the_way != nullptr) return invalidate(*in_the_way, kCaptureImplicit);
  }
  wait_implicitly(stream);
  stream->enqueue(std::move(work), writes);
  return kSuccess;
}

namespace {

/// For calls that ask what a stream has done, which says nothing of one that is captured.
int forbid_for(Stream& stream) {
  {
    const std::lock_guard lock(captures().mutex);
    if (stream.capture != nullptr) return invalidate(*stream.capture, kCaptureUnsupported);
    const CapturePtr in_the_way = stream.is_legacy ? in_the_way_of_legacy(stream.device) : nullptr;
    if (in_the_way != nullptr) return invalidate(*in_the_way, kCaptureImplicit);
  }
  return forbid_while_capturing();
}

/// For calls that ask what an event has done.
int forbid_for(Event& event) {
  {
    const std::lock_guard lock(captures().mutex);
    if (event.capture != nullptr) return invalidate(*event.capture, kCapturedEvent);
  }
  return forbid_while_capturing();
}

/// Whether the event is of a capture: then `code` is what the wait for it gives, and there is no more to do.
bool wait_in_capture(Stream& stream, Event& event, int& code) {
  const std::lock_guard lock(captures().mutex);
  code = kSuccess;
  if (event.capture == nullptr) {
    if (stream.capture != nullptr) code = invalidate(*stream.capture, kCaptureIsolation);
    return stream.capture != nullptr;
  }
  Capture& capture = *event.capture;
  if (capture.ended) {
    code = kCapturedEvent;
  } else if (stream.capture != nullptr && stream.capture != event.capture) {
    invalidate(*stream.capture, kCaptureMerge);
    code = invalidate(capture, kCaptureMerge);
  } else {
    stream.capture = event.capture;
    if (&stream != capture.origin) capture.forked.try_emplace(&stream, 0);
    const auto from = capture.forked.find(event.captured_in);
    const bool has_all = event.captured_at == capture.n_gotten[event.captured_in];
    if (from != capture.forked.end() && event.captured_in != &stream && has_all) capture.forked.erase(from);
  }
  return true;
}

std::map<void*, std::shared_ptr<std::vector<Node>>>& graphs() {
  static auto& all = *new std::map<void*, std::shared_ptr<std::vector<Node>>>;
  return all;
}

void* keep_graph(std::shared_ptr<std::vector<Node>> nodes) {
  auto own = std::make_shared<std::vector<Node>>(*nodes);
  void* const handle = own.get();
  graphs()[handle] = std::move(own);
  return handle;
}

}  // namespace
}  // namespace fake

using namespace fake;

EXPORT int GPU(StreamCreateWithFlags)(void** out, unsigned flags) {
  ++made().streams;
  const std::lock_guard lock(world().mutex);
  auto stream = std::make_shared<Stream>(use_device(), flags != 0);
  *out = stream.get();
  world().streams[*out] = std::move(stream);
  return ended(kSuccess);
}
EXPORT int GPU(StreamDestroy)(void* handle) {
  const auto stream = stream_of(handle);
  if (!stream) return ended(kInvalidHandle);
  {
    const std::lock_guard lock(world().mutex);
    world().streams.erase(handle);
    world().destroyed[handle] = stream;
  }
  std::thread([stream, handle] {  // what it holds is still done
    stream->end();
    const std::lock_guard lock(world().mutex);
    world().destroyed.erase(handle);
  })
      .detach();
  return ended(kSuccess);
}
EXPORT int GPU(StreamQuery)(void* handle) {
  const auto stream = stream_of(handle);
  if (!stream) return ended(kInvalidHandle);
  if (const int code = forbid_for(*stream)) return ended(code);
  return ended(stream->idle() ? kSuccess : kNotReady);
}
EXPORT int GPU(StreamSynchronize)(void* handle) {
  ++n_synchronized();
  ++made().waits;
  const auto stream = stream_of(handle);
  if (!stream) return ended(kInvalidHandle);
  if (const int code = forbid_for(*stream)) return ended(code);
  wait_implicitly(stream);
  stream->drain();
  return ended(kSuccess);
}

EXPORT int GPU(EventCreateWithFlags)(void** out, unsigned) {
  ++made().events;
  const std::lock_guard lock(world().mutex);
  auto event = std::make_shared<Event>(use_device());
  *out = event.get();
  world().events[*out] = std::move(event);
  return ended(kSuccess);
}
EXPORT int GPU(EventDestroy)(void* handle) {
  const std::lock_guard lock(world().mutex);
  return ended(world().events.erase(handle) != 0 ? kSuccess : kInvalidHandle);
}
EXPORT int GPU(EventRecord)(void* handle, void* stream_handle) {
  const auto event = event_of(handle);
  const auto stream = stream_of(stream_handle);
  if (!event || !stream || event->device != stream->device) return ended(kInvalidHandle);
  {
    const std::lock_guard lock(captures().mutex);
    event->capture = stream->capture;
    event->captured_in = stream.get();
    if (const auto& capture = stream->capture) {
      event->captured_at = capture->n_gotten[stream.get()];
      return ended(capture->invalid ? kCaptureInvalidated : kSuccess);
    }
  }
  const auto record = std::make_shared<Record>();
  {
    const std::lock_guard lock(event->mutex);
    event->last = record;
  }
  const int code = submit(stream, [record] { record->happen(); });
  if (code != kSuccess) record->happen();
  return ended(code);
}
EXPORT int GPU(EventQuery)(void* handle) {
  queries().await_release();
  const auto event = event_of(handle);
  if (!event) return ended(kInvalidHandle);
  if (const int code = forbid_for(*event)) return ended(code);
  const std::lock_guard lock(event->mutex);
  if (event->device >= n_devices()) return ended(kInvalidDevice);  // it has gone
  return ended(event->last == nullptr || event->last->has_happened() ? kSuccess : kNotReady);
}
EXPORT int GPU(EventSynchronize)(void* handle) {
  ++made().waits;
  const auto event = event_of(handle);
  if (!event) return ended(kInvalidHandle);
  if (const int code = forbid_for(*event)) return ended(code);
  if (const auto record = event->last_record()) record->wait();
  return ended(kSuccess);
}
EXPORT int GPU(StreamWaitEvent)(void* stream_handle, void* handle, unsigned) {
  const auto event = event_of(handle);
  const auto stream = stream_of(stream_handle);
  if (!event || !stream) return ended(kInvalidHandle);
  int code = kSuccess;
  if (wait_in_capture(*stream, *event, code)) return ended(code);
  const char* const ignored = std::getenv("FAKE_GPU_IGNORE_WAITS");
  if (ignored != nullptr && (std::strcmp(ignored, "library") == 0) == stream->of_library) return kSuccess;
  const auto record = event->last_record();
  if (record == nullptr) return ended(kSuccess);
  return ended(submit(stream, [record] {
    const Stuck stuck([record] { return record->has_happened(); });
    record->wait();
  }));
}

// ---- graphs

EXPORT int GPU(ThreadExchangeStreamCaptureMode)(int* mode) {
  *mode = static_cast<int>(std::exchange(thread_mode, static_cast<CaptureMode>(*mode)));
  return ended(kSuccess);
}
EXPORT int GPU(StreamBeginCapture)(void* handle, int mode) {
  const auto stream = stream_of(handle);
  if (!stream) return ended(kInvalidHandle);
  if (stream->is_legacy) return ended(kCaptureUnsupported);
  const std::lock_guard lock(captures().mutex);
  if (stream->capture != nullptr) return ended(kIllegalState);
  stream->capture = std::make_shared<Capture>(
      Capture{static_cast<CaptureMode>(mode), std::this_thread::get_id(), stream.get(), false, false, {}, {}, {}});
  captures().active.push_back(stream->capture);
  return ended(kSuccess);
}
EXPORT int GPU(StreamIsCapturing)(void* handle, int* out) {
  looks().await_release();
  const auto stream = stream_of(handle);
  if (!stream) return ended(kInvalidHandle);
  const std::lock_guard lock(captures().mutex);
  if (stream->is_legacy && in_the_way_of_legacy(stream->device) != nullptr) return ended(kCaptureImplicit);
  *out = stream->capture == nullptr ? 0 : stream->capture->invalid ? 2 : 1;
  return ended(kSuccess);
}
EXPORT int GPU(StreamEndCapture)(void* handle, void** out) {
  const auto stream = stream_of(handle);
  *out = nullptr;
  if (!stream) return ended(kInvalidHandle);
  CapturePtr capture;
  {
    const std::lock_guard lock(captures().mutex);
    capture = stream->capture;
    if (capture == nullptr) return ended(kIllegalState);
    if (capture->origin != stream.get()) return ended(invalidate(*capture, kCaptureUnmatched));
    const bool is_owner = capture->owner == std::this_thread::get_id();
    if (!is_owner && capture->mode != CaptureMode::relaxed) return ended(invalidate(*capture, kCaptureWrongThread));
    auto& active = captures().active;
    active.erase(std::find(active.begin(), active.end(), capture));
    capture->ended = true;
  }
  for (const StreamPtr& each : all_streams()) {
    const std::lock_guard lock(captures().mutex);
    if (each->capture == capture) each->capture = nullptr;
  }
  const std::lock_guard lock(captures().mutex);
  if (capture->invalid) return ended(kCaptureInvalidated);
  if (!capture->forked.empty()) return ended(kCaptureUnjoined);
  *out = keep_graph(std::make_shared<std::vector<Node>>(capture->nodes));
  return ended(kSuccess);
}
EXPORT int GPU(GraphInstantiate)(void** out, void* graph, unsigned long long) {
  const std::lock_guard lock(captures().mutex);
  const auto found = graphs().find(graph);
  if (found == graphs().end()) return ended(kInvalidValue);
  *out = keep_graph(found->second);
  return ended(kSuccess);
}
EXPORT int GPU(GraphLaunch)(void* graph, void* stream_handle) {
  const auto stream = stream_of(stream_handle);
  if (!stream) return ended(kInvalidHandle);
  std::shared_ptr<std::vector<Node>> nodes;
  {
    const std::lock_guard lock(captures().mutex);
    const auto found = graphs().find(graph);
    if (found == graphs().end()) return ended(kInvalidValue);
    nodes = found->second;
  }
  for (const Node& node : *nodes) {
    if (const int code = submit(stream, node.work, node.writes)) return ended(code);
  }
  return ended(kSuccess);
}
/// How many; the nodes themselves are no handles here.
EXPORT int GPU(GraphGetNodes)(void* graph, void** nodes, std::size_t* n) {
  const std::lock_guard lock(captures().mutex);
  const auto found = graphs().find(graph);
  if (found == graphs().end() || nodes != nullptr) return ended(kInvalidValue);
  *n = found->second->size();
  return ended(kSuccess);
}
EXPORT int GPU(GraphDestroy)(void* graph) {
  const std::lock_guard lock(captures().mutex);
  return ended(graphs().erase(graph) != 0 ? kSuccess : kInvalidValue);
}
EXPORT int GPU(GraphExecDestroy)(void* graph) { return GPU(GraphDestroy)(graph); }
