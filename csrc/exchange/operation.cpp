#include "exchange/operation.h"

#include <cstring>

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"

namespace samestep {

bool Operation::done() {
  if (!finished()) engine_->progress();
  return finished();
}

void Operation::fail(std::exception_ptr error) {
  if (finished()) return;
  give_up();
  error_ = std::move(error);
  finish();
}

void Collective::begin(std::uint64_t sequence) {
  sequence_ = sequence;
  announce_if_room();
}

bool Collective::announce_if_room() {
  if (!engine().meeting().has_room(sequence_)) return false;
  announce(digest_);
  stage_ = Stage::meet;
  return true;
}

bool Collective::advance() {
  if (stage_ == Stage::announce && !announce_if_room()) return false;
  if (stage_ == Stage::meet) {
    Meeting& meeting = engine().meeting();
    if (!meeting.complete(sequence_)) return false;
    if (ranks_agree()) {
      stage_ = Stage::work;
      try {
        start_work();
      } catch (...) {  // one rank's data does not fit: the group goes on
        meeting.release(sequence_);
        throw;
      }
    } else {
      exchange_descriptions();
      stage_ = Stage::describe;
    }
    if (!(stage_ == Stage::work && keeps_meeting())) meeting.release(sequence_);
  }
  if (stage_ == Stage::describe) {
    if (!descriptions_under_way_.test(engine().messenger())) return false;
    throw_mismatch();
  }
  try {
    if (!work()) return false;
  } catch (const MismatchError&) {  // one rank's data does not fit: the group goes on
    if (keeps_meeting()) engine().meeting().release(sequence_);
    throw;
  }
  if (keeps_meeting()) engine().meeting().release(sequence_);
  return true;
}

bool Collective::ranks_agree() {
  bool agree = true;
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (peer == engine().rank()) continue;
    const Meeting::Header header = engine().meeting().header(sequence_, peer);
    if (header.sequence != static_cast<std::uint32_t>(sequence_)) {
      throw Error(str(describe(), ": rank ", peer, " is at operation ", header.sequence,
                      "; messages were lost or mixed up by the transport"));
    }
    agree = agree && header.digest == digest_;
  }
  return agree;
}

void Collective::exchange_descriptions() {
  descriptions_.resize(static_cast<std::size_t>(engine().size()));
  const auto rank = static_cast<std::size_t>(engine().rank());
  const std::string mine = signature_.describe();
  std::strncpy(descriptions_[rank].data(), mine.c_str(), kDescription - 1);
  const int tag = tags::of_operation(sequence_, tags::kPhaseDescribe);
  for (int peer = 0; peer < engine().size(); ++peer) {
    if (peer == engine().rank()) continue;
    descriptions_under_way_.send(engine().messenger(), descriptions_[rank].data(), kDescription, peer, tag);
    descriptions_under_way_.receive(engine().messenger(), descriptions_[static_cast<std::size_t>(peer)].data(),
                                    kDescription, peer, tag);
  }
}

void Collective::throw_mismatch() {
  std::vector<std::string> texts;
  for (const auto& description : descriptions_) texts.emplace_back(description.data());
  throw MismatchError(mismatch_text(engine().name(), sequence_, texts));
}

bool Collective::needs(int peer, std::uint64_t first_missing) {
  // A peer that has left after taking part has sent all it had to send.
  (void)peer;
  return sequence_ >= first_missing;
}

std::string Collective::describe() const {
  return str(signature_.describe(), " (operation ", sequence_, " of group '", engine().name(), "')");
}

std::vector<int> Collective::waits_for() {
  return stage_ == Stage::work ? awaited() : engine().meeting().missing(sequence_);
}

}  // namespace samestep
