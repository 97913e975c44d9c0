#pragma once

#include <memory>

namespace samestep {

/// Something that advances only while a thread polls it. Peers may wait for it while this rank waits for something
/// else, so whoever waits lets all of them advance now and then.
class Bystander {
 public:
  virtual ~Bystander() = default;
  /// One step, unless another thread is at it. Never blocks, never throws.
  virtual void advance() = 0;
};

/// Lets `bystander` advance in all waits, for as long as it lives.
void add_bystander(std::weak_ptr<Bystander> bystander);

/// To be called about every millisecond of waiting, without locks held.
void advance_bystanders();

}  // namespace samestep
