#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include "exchange/messenger.h"
#include "tcp/frame.h"

namespace samestep::tcp {

/// A send or receive under way.
struct Record {
  bool ended = false;
  int peer = -1, tag = -1;
  const std::byte* from = nullptr;
  std::byte* into = nullptr;
  std::size_t nbytes = 0;    ///< of the message sent; room of a receive, then of the message that met it
  std::size_t moved = 0;     ///< of a message that comes in pieces
  std::size_t too_long = 0;  ///< bytes of a message that did not fit
  Messenger::Envelope met;   ///< the message that met this receive; source -1 until then
  std::uint64_t order = 0;   ///< of a posted receive among those of its group
};

/// A message that had come before a receive wanted it, or an offer of one.
struct Arrived {
  int source, tag;
  std::size_t nbytes;
  std::unique_ptr<std::byte[]> bytes;
  std::uint32_t id = 0;
  bool offered = false;
  bool complete = false;
  Record* taker = nullptr;  ///< it has met a receive, although it is not complete
};

/// The receives and messages of one group on one rank, met in order by (source, tag). Sources are ranks of the world.
class Matching {
 public:
  explicit Matching(int world_size) : posted_(static_cast<std::size_t>(world_size) + 1) {}

  Record* new_record();
  void drop(Record* record);

  void post(Record* receive);
  /// False if it is not posted any more.
  bool withdraw(Record* receive);
  /// Takes the first posted receive that wants such a message; null if there is none.
  Record* meet(int source, int tag);

  Arrived& keep(Arrived arrived);
  /// The first message that the receive wants, or null.
  Arrived* find(const Record& receive);
  /// The first complete one with this tag, or null.
  const Arrived* find_complete(int tag) const;
  void erase(const Arrived* arrived);
  /// Nobody is to get what has not come in full from a source that is lost.
  void forget_incomplete(int source);
  /// Nothing is posted or kept any more; records stay.
  void forget_all();
  /// The receive wants its message no more.
  void leave_behind(const Record* receive);

 private:
  using Queue = std::vector<Record*>;  // short
  Queue& queue(int source) { return posted_[static_cast<std::size_t>(source + 1)]; }

  std::deque<Record> records_;
  std::vector<Record*> free_;
  std::vector<Queue> posted_;  // by source + 1, first those from any source
  std::list<Arrived> arrived_;
  std::uint64_t next_order_ = 0;
  Record nobody_;  // takes what is thrown away
};

}  // namespace samestep::tcp
