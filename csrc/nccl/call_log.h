#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "communicator/communicator.h"

namespace samestep {

/// Compares the operations that the ranks of a group launch on their devices, beside them and many at a time.
///
/// Each rank notes its calls. An exchange takes the digests of those that are not known to agree yet; what all ranks
/// have noted by then is compared, and the rest comes with the next exchange. A rank starts one as soon as it has
/// something to compare, so all start the same number of them, whatever the pace of each. Only if digests differ do
/// the ranks exchange descriptions.
///
/// Not thread-safe.
class CallLog {
 public:
  /// `group`: used by nobody else meanwhile.
  explicit CallLog(std::shared_ptr<Communicator> group, std::string name);
  ~CallLog();
  CallLog(const CallLog&) = delete;
  CallLog& operator=(const CallLog&) = delete;

  /// Notes the next call. `operation`: its number, for texts. Returns what `agrees` takes.
  std::uint64_t add(const Signature& signature, bool is_captured, std::uint64_t operation);
  /// Makes progress. Throws a MismatchError on all ranks if calls differ, and the errors of the group. Never blocks.
  void progress();
  bool agrees(std::uint64_t call) const { return call < n_agreed_; }
  /// Whether all calls agree.
  bool is_idle() const { return calls_.empty(); }
  /// For the text of a TimeoutError: which ranks have not made the calls of this one. Empty if that is not known.
  std::string late_ranks(Seconds waited) const;

 private:
  static constexpr std::size_t kFewAtOnce = 7, kMostAtOnce = 511;

  struct Call {
    Signature signature;
    std::uint64_t digest, operation;
    bool is_captured;
    std::string called;  // by the user
    Description describe() const;
  };
  void start_exchange();
  /// Compares what has arrived. True if descriptions are exchanged next.
  bool compare();
  [[noreturn]] void throw_mismatch() const;
  Communicator::WorkPtr gather(const void* mine, void* all, std::size_t nbytes);

  std::shared_ptr<Communicator> group_;
  std::string name_;
  std::deque<Call> calls_;  // not known to agree
  std::uint64_t n_agreed_ = 0;
  Communicator::WorkPtr exchange_;
  bool differ_ = false;                    // `exchange_` is one of descriptions
  std::size_t at_once_ = kFewAtOnce;       // the same on all ranks
  std::vector<std::uint64_t> mine_, all_;  // of each rank: how many digests, and these
  std::vector<Description> descriptions_;
};

}  // namespace samestep
