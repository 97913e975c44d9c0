#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "gpu/staging.h"

namespace samestep {

/// An operation of HostStaging.
class HostStaging::StagedWork final : public Work {
 public:
  /// Records what the streams of the arrays have so far, which blocks while one of them is full. The caller must hold
  /// no locks.
  StagedWork(std::shared_ptr<HostStaging> stager, StagedOperation call);

  bool done() override;
  void wait(const Deadline& deadline) override { wait_for(ended_, deadline); }
  bool make_stream_wait(StreamHandle stream, const Deadline& deadline) override;
  bool cancel() override;
  std::exception_ptr error() const override { return ended_ ? error_ : nullptr; }
  bool asks_device() const override { return true; }
  bool has_ended() const override { return ended_; }
  bool device_has_ended() const override { return stager_->is_idle(); }
  Status status() const override { return status_; }

  // ---- called by HostStaging, which holds its mutex

  bool is_message() const { return call_.type != StagedOperation::Type::collective; }
  bool ended() const { return ended_; }
  /// Whether all of it has started on the host, so that the next operation may.
  bool has_started() const {
    // What is sent later finds its place behind the header; the segments of a message may wait for its receiver.
    return ended_ || (sends() && n_started_ != 0) || are_all(n_started_);
  }
  bool sends() const { return call_.type == StagedOperation::Type::send; }
  bool will_send(int dest, int tag) const {
    return sends() && call_.dest == dest && call_.tag == tag && !has_started();
  }
  /// Whether copies to the host may be in the stream, since not all of it has started there.
  bool copies_out() const { return sends() ? n_copied_ != n_started_ && !ended_ : n_copied_ != 0 && !has_started(); }
  /// Whether more of it will be copied to the host.
  bool has_more_to_copy() const { return !ended_ && call_.parts[0].in != nullptr && !are_all(n_copied_); }
  /// Whether the next device-to-host copy may be enqueued before those of earlier operations. Only if its producer
  /// kernel is done: otherwise their copies queue behind that kernel, which may itself be waiting for them (deadlock).
  bool may_copy_before_others() { return n_copied_ != 0 || call_.parts[0].in == nullptr || is_produced(); }
  /// Makes a step of each segment. `may_begin`: whether segments may start on the host. `may_copy`: whether another
  /// copy may be put into the stream.
  void advance(bool may_begin, bool may_copy);
  void fail(std::exception_ptr error);

 private:
  struct RemoteSegment {
    StagedSegment part;
    std::shared_ptr<std::byte> memory;
    std::byte* out;
    std::shared_ptr<GpuEvent> copied = nullptr;  ///< its last copy; null: there was none
    Communicator::WorkPtr work = nullptr;
    bool awaits_stream = false;  ///< of a GPU-direct receive: its memory is still used for something else
    bool back = false;
  };

  /// Whether so many segments are all of them.
  bool are_all(std::size_t n) const { return n == call_.parts.size() && call_.then == nullptr; }
  static bool is_copied(const RemoteSegment& piece) { return piece.copied == nullptr || piece.copied->is_complete(); }
  /// Whether the streams of the arrays have done what they had at the call.
  bool is_produced();
  bool may_copy_more() const { return call_.copies_in_first || pieces_.size() < kInFlight; }
  /// Whether a transport or a copy may still use the memory of a segment.
  static bool is_in_use(const RemoteSegment& piece) noexcept;
  /// Lets later work in a stream of the package wait for those of the arrays, once.
  void make_wait(const GpuStream& stream, bool& waits);
  void add_segments();
  void copy_out();
  void advance_segments(bool may_begin);
  /// Starts the segments that have been copied to the host. Of a collective the first one alone: if ranks differ, it
  /// fails before another one has started.
  bool may_start(RemoteSegment& piece, bool may_begin);
  /// What lies on the host once the operation has ended, and belongs on the device.
  std::span<const std::byte> to_copy_back(const RemoteSegment& piece) const;
  void copy_back(RemoteSegment& piece);
  void wait_for(const std::atomic<bool>& reached, const Deadline& deadline);
  /// Throws a TimeoutError that names the missing ranks.
  [[noreturn]] void throw_late(const Deadline& deadline);

  std::shared_ptr<HostStaging> stager_;
  StagedOperation call_;
  std::deque<RemoteSegment> pieces_;
  std::size_t n_copied_ = 0, n_started_ = 0, n_handed_over_ = 0, n_finished_ = 0;
  Communicator::WorkPtr last_started_;
  std::vector<std::shared_ptr<GpuEvent>> produced_;  // what the streams of the arrays had at the call
  bool is_produced_ = false;                         // all of it is done
  bool inputs_are_copied_ = false;                   // where all are copied first
  bool waits_out_ = false, waits_in_ = false;
  std::shared_ptr<GpuEvent> end_;
  Status status_;
  std::exception_ptr error_;
  // Both are stored last: they publish `end_`, `status_` and `error_` to threads that poll without the mutex.
  std::atomic<bool> handed_over_ = false;  // what remains of the work is in the stream
  std::atomic<bool> ended_ = false;
};

}  // namespace samestep
