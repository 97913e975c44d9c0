#include "nccl/call_log.h"

#include <algorithm>

#include "core/error.h"
#include "core/format.h"
#include "process/user_call.h"

namespace samestep {

Description CallLog::Call::describe() const {
  return description(called, str(signature.describe(), is_captured ? " captured into a graph" : ""));
}

CallLog::CallLog(std::shared_ptr<Communicator> group, std::string name)
    : group_(std::move(group)), name_(std::move(name)) {}

CallLog::~CallLog() {
  // What is in flight writes here.
  if (exchange_ == nullptr || exchange_->done()) return;
  group_->abandon(std::make_exception_ptr(NotInitializedError("the group was dropped")), "it has dropped the group");
}

std::uint64_t CallLog::add(const Signature& signature, bool is_captured, std::uint64_t operation) {
  if (group_->size() == 1) return n_agreed_++;
  const std::uint64_t digest = signature.digest() + (is_captured ? 1 : 0);
  calls_.push_back({signature, digest, operation, is_captured, user_call()});
  return n_agreed_ + calls_.size() - 1;
}

void CallLog::progress() {
  while (!calls_.empty()) {
    if (exchange_ == nullptr) start_exchange();
    if (!exchange_->done()) return;
    const Communicator::WorkPtr ended = std::exchange(exchange_, nullptr);
    if (const std::exception_ptr error = ended->error()) std::rethrow_exception(error);
    if (differ_) throw_mismatch();
    differ_ = compare();
  }
}

void CallLog::start_exchange() {
  // Errors name the user's call.
  const UserCall about(calls_.front().signature.describe(), UserCall::Inside::instead);
  if (differ_) {
    descriptions_.resize(static_cast<std::size_t>(group_->size()));
    Description& mine = descriptions_[static_cast<std::size_t>(group_->rank())];
    mine = calls_.front().describe();
    exchange_ = gather(mine.data(), descriptions_.data(), sizeof mine);
    return;
  }
  mine_.assign(1 + at_once_, 0);
  all_.resize(mine_.size() * static_cast<std::size_t>(group_->size()));
  mine_[0] = std::min(calls_.size(), at_once_);
  for (std::size_t i = 0; i < mine_[0]; ++i) mine_[1 + i] = calls_[i].digest;
  exchange_ = gather(mine_.data(), all_.data(), 8 * mine_.size());
}

Communicator::WorkPtr CallLog::gather(const void* mine, void* all, std::size_t nbytes) {
  return group_->start({.type = CollectiveType::allgather,
                        .in = {mine, nbytes, DType::uint8},
                        .out = {all, nbytes * static_cast<std::size_t>(group_->size()), DType::uint8},
                        .shape = Shape::flat(nbytes)});
}

bool CallLog::compare() {
  std::uint64_t n = at_once_;
  for (std::size_t rank = 0; rank < all_.size(); rank += mine_.size()) n = std::min(n, all_[rank]);
  for (std::size_t i = 1; i <= n; ++i) {
    for (std::size_t rank = 0; rank < all_.size(); rank += mine_.size()) {
      if (all_[rank + i] != mine_[i]) return true;
    }
    calls_.pop_front();
    ++n_agreed_;
  }
  // Exchanges take their time, so many calls a millisecond need long ones.
  at_once_ = n == at_once_ ? kMostAtOnce : kFewAtOnce;
  return false;
}

void CallLog::throw_mismatch() const {
  std::vector<std::string> texts;
  for (const auto& of_rank : descriptions_) texts.emplace_back(of_rank.data());
  throw MismatchError(mismatch_text(name_, calls_.front().operation, std::move(texts)));
}

std::string CallLog::late_ranks(Seconds waited) const {
  return exchange_ == nullptr ? "" : exchange_->timeout_message(waited);
}

}  // namespace samestep
