#include "engine/operation.h"

#include "core/error.h"
#include "core/format.h"
#include "transport/tags.h"

namespace samestep {

bool Operation::done() {
  if (!finished()) engine_->progress();
  return finished();
}

std::string Operation::describe() const {
  return str(called_.empty() ? what() : called_, " (", which(), "group '", engine_->name(), "')");
}

void Operation::fail(std::exception_ptr error) {
  if (finished()) return;
  abort();
  // Before `finish`, whose release publishes it: threads read `error` without the mutex.
  error_ = std::move(error);
  finish();
}

void Collective::begin(std::uint64_t sequence) {
  sequence_ = sequence;
  // Without room, because peers have not released earlier operations, `advance` posts the header later.
  post_if_possible();
}

bool Collective::post_if_possible() {
  if (!headers().can_post(sequence_)) return false;
  post(digest_);
  stage_ = Stage::exchange_headers;
  return true;
}

bool Collective::advance() {
  if (stage_ == Stage::post && !post_if_possible()) return false;
  if (stage_ == Stage::exchange_headers) {
    if (!headers().complete(sequence_)) return false;
    // Every rank compares its digest with those of all others, so either all find a mismatch or none does, and the
    // exchange of descriptions has all ranks.
    if (headers_agree(engine(), sequence_, digest_)) {
      stage_ = Stage::work;
      try {
        start_work();
      } catch (...) {  // the data of one rank do not fit: only this operation fails
        headers().release(sequence_);
        throw;
      }
    } else {
      require_sequence();
      exchange_descriptions();
      stage_ = Stage::mismatch;
    }
    // As early as possible: peers that are ahead can post more operations only once this rank has released its
    // slots.
    if (!(stage_ == Stage::work && holds_headers())) headers().release(sequence_);
  }
  if (stage_ == Stage::mismatch) {
    if (!pending_descriptions_.test(transport())) return false;
    throw_mismatch();
  }
  try {
    if (!work()) return false;
  } catch (const MismatchError&) {  // the data of one rank do not fit: only this operation fails
    if (holds_headers()) headers().release(sequence_);
    throw;
  }
  if (holds_headers()) headers().release(sequence_);
  return true;
}

bool Collective::headers_agree(ProgressEngine& engine, std::uint64_t sequence, std::uint64_t digest) {
  for (int peer = 0; peer < engine.size(); ++peer) {
    if (peer == engine.rank()) continue;
    const HeaderExchange::Header header = engine.header_exchange().header(sequence, peer);
    if (header.digest != digest || header.sequence != static_cast<std::uint32_t>(sequence)) return false;
  }
  return true;
}

void Collective::require_sequence() {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    const HeaderExchange::Header header = headers().header(sequence_, peer);
    // Every rank numbers its operations 0, 1, 2, ..., so another number means that headers were lost. An Error that is
    // no MismatchError ends the group, see ProgressEngine::advance.
    if (header.sequence != static_cast<std::uint32_t>(sequence_)) {
      throw Error(str(describe(), ": rank ", peer, " is at operation ", header.sequence,
                      "; messages were lost or mixed up by the transport"));
    }
  }
}

void Collective::exchange_descriptions() {
  descriptions_.resize(static_cast<std::size_t>(size()));
  const auto me = static_cast<std::size_t>(rank());
  // All descriptions have one length, so that receives can be posted before the texts of the others are known.
  descriptions_[me] = description(called(), what());
  const int tag = tags::of_operation(sequence_, tags::kPhaseDescribe);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    Description& theirs = descriptions_[static_cast<std::size_t>(peer)];
    pending_descriptions_.send(transport(), descriptions_[me].data(), sizeof theirs, peer, tag);
    pending_descriptions_.receive(transport(), theirs.data(), sizeof theirs, peer, tag);
  }
}

void Collective::throw_mismatch() {
  std::vector<std::string> texts;
  for (const auto& description : descriptions_) texts.emplace_back(description.data());
  throw MismatchError(mismatch_text(engine().name(), sequence_, texts));
}

bool Collective::needs(int peer, std::uint64_t first_absent) {
  // A peer that left after taking part has sent all of its messages.
  (void)peer;
  return sequence_ >= first_absent;
}

std::string Collective::which() const { return str("operation ", sequence_, " of "); }

std::vector<int> Collective::pending_peers_of_operation() {
  return stage_ == Stage::work ? pending_peers() : headers().missing(sequence_);
}

}  // namespace samestep
