#include "exchange/group_call.h"

#include <algorithm>

#include "core/error.h"
#include "core/format.h"
#include "exchange/tags.h"

namespace samestep {

GroupCall::GroupCall(std::shared_ptr<Engine> shared_engine, std::vector<int> ranks)
    : Operation(std::move(shared_engine)), ranks_(std::move(ranks)), words_(ranks_.size()), receives_(ranks_.size()) {
  std::uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a over the ranks
  for (const int rank : ranks_) digest = (digest ^ static_cast<std::uint64_t>(rank)) * 0x100000001b3u;
  word_.digest = digest;
}

void GroupCall::begin(std::uint64_t) {
  word_.number = engine().messenger().next_group();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    words_[i] = word_;
    if (ranks_[i] == engine().rank()) continue;
    sends_.send(engine().messenger(), &word_, sizeof word_, ranks_[i], tags::kMakeGroup);
    receives_[i].receive(engine().messenger(), &words_[i], sizeof words_[i], ranks_[i], tags::kMakeGroup);
  }
}

bool GroupCall::advance() {
  bool finished = sends_.test(engine().messenger());
  for (Requests& receive : receives_) finished = receive.test(engine().messenger()) && finished;
  if (!finished) return false;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (words_[i].digest != word_.digest) {
      throw MismatchError(str(describe(), ": rank ", ranks_[i], " calls group with another list of ranks"));
    }
  }
  return true;
}

std::uint32_t GroupCall::number() const {
  std::uint32_t highest = 0;
  for (const Word& word : words_) highest = std::max(highest, word.number);
  return highest;
}

bool GroupCall::needs(int peer, std::uint64_t) {
  const auto found = std::find(ranks_.begin(), ranks_.end(), peer);
  return found != ranks_.end() &&
         !receives_[static_cast<std::size_t>(found - ranks_.begin())].test(engine().messenger());
}

std::string GroupCall::describe() const {
  std::string list;
  for (const int rank : ranks_) list += str(list.empty() ? "" : ", ", rank);
  return str("group of ranks [", list, "] (of group '", engine().name(), "')");
}

std::vector<int> GroupCall::waits_for() {
  std::vector<int> late;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!receives_[i].test(engine().messenger())) late.push_back(ranks_[i]);
  }
  return late;
}

void GroupCall::give_up() {
  for (Requests& receive : receives_) receive.abandon(engine().messenger());
}

}  // namespace samestep
