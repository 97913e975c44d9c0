#pragma once

// Capture of streams into graphs, as CUDA does it: who may call what meanwhile, and what a wrong call makes of it.
// Source: CUDA Runtime API, "Stream Management" (cudaStreamBeginCapture, cudaThreadExchangeStreamCaptureMode).

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fake {

enum Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

enum class CaptureMode : int { global, thread_local_, relaxed };

struct Stream;
struct Node {
  std::function<void()> work;
  bool writes;
};
struct Capture {
  CaptureMode mode;
  std::thread::id owner;
  const Stream* origin;
  bool invalid = false, ended = false;
  std::vector<Node> nodes;                 // in an order that keeps all dependencies
  std::map<const Stream*, long> forked;    // streams that have to be joined again: how much each has got
  std::map<const Stream*, long> n_gotten;  // things of each stream
};

/// Captures in progress in this process.
struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> active;
};
inline Captures& captures() {
  static auto& all = *new Captures;
  return all;
}
inline thread_local CaptureMode thread_mode = CaptureMode::global;

/// For calls that are unsafe while a capture is in progress: an error where this thread must not make them now, which
/// makes the capture worthless.
inline int forbid_while_capturing() {
  if (thread_mode == CaptureMode::relaxed) return kSuccess;
  const std::lock_guard lock(captures().mutex);
  int code = kSuccess;
  for (const auto& capture : captures().active) {
    const bool own = capture->owner == std::this_thread::get_id() && capture->mode != CaptureMode::relaxed;
    const bool any = thread_mode == CaptureMode::global && capture->mode == CaptureMode::global;
    if (!own && !any) continue;
    capture->invalid = true;
    code = kCaptureUnsupported;
  }
  return code;
}

inline int invalidate(Capture& capture, int code) {
  capture.invalid = true;
  return code;
}

}  // namespace fake
