#pragma once

#include <memory>

namespace samestep {

/// Something that makes progress only while a thread polls it. Peers may wait for it while this rank waits for
/// something else, so every waiting thread polls all sources from time to time.
class ProgressSource {
 public:
  virtual ~ProgressSource() = default;
  /// Makes one step, unless another thread is doing so. Never blocks, never throws.
  virtual void advance() = 0;
};

/// Lets `source` advance in all waits, for as long as it lives.
void register_progress_source(std::weak_ptr<ProgressSource> source);

/// To be called about every millisecond of waiting, without holding locks.
void progress_all();

}  // namespace samestep
