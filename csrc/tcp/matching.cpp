#include "tcp/matching.h"

#include <algorithm>

#include "communicator/communicator.h"

namespace samestep::tcp {

static_assert(kAnySource == -1, "queues are numbered from it");

Record* Matching::new_record() {
  if (free_.empty()) return &records_.emplace_back();
  Record* const record = free_.back();
  free_.pop_back();
  *record = Record{};
  return record;
}

void Matching::drop(Record* record) { free_.push_back(record); }

void Matching::post(Record* receive) {
  receive->order = next_order_++;
  queue(receive->peer).push_back(receive);
}

bool Matching::withdraw(Record* receive) { return std::erase(queue(receive->peer), receive) != 0; }

Record* Matching::meet(int source, int tag) {
  const auto first = [tag](Queue& posted) {
    return std::find_if(posted.begin(), posted.end(), [tag](const Record* r) { return r->tag == tag; });
  };
  Queue &from_source = queue(source), &from_any = queue(kAnySource);
  const auto a = first(from_source), b = first(from_any);
  if (a == from_source.end() && b == from_any.end()) return nullptr;
  const bool takes_any = a == from_source.end() || (b != from_any.end() && (*b)->order < (*a)->order);
  Record* const record = takes_any ? *b : *a;
  takes_any ? from_any.erase(b) : from_source.erase(a);
  return record;
}

Arrived& Matching::keep(Arrived arrived) { return arrived_.emplace_back(std::move(arrived)); }

Arrived* Matching::find(const Record& receive) {
  const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrived& a) {
    return a.taker == nullptr && a.tag == receive.tag && (receive.peer == kAnySource || receive.peer == a.source);
  });
  return found == arrived_.end() ? nullptr : &*found;
}

const Arrived* Matching::find_complete(int tag) const {
  const auto found = std::find_if(arrived_.begin(), arrived_.end(), [tag](const Arrived& a) {
    return a.complete && !a.offered && a.taker == nullptr && a.tag == tag;
  });
  return found == arrived_.end() ? nullptr : &*found;
}

void Matching::erase(const Arrived* arrived) {
  arrived_.remove_if([arrived](const Arrived& a) { return &a == arrived; });
}

void Matching::forget_incomplete(int source) {
  arrived_.remove_if([source](const Arrived& a) { return a.source == source && (!a.complete || a.offered); });
}

void Matching::forget_all() {
  for (Queue& posted : posted_) posted.clear();
  arrived_.clear();
}

void Matching::leave_behind(const Record* receive) {
  for (Arrived& arrived : arrived_) {
    if (arrived.taker == receive) arrived.taker = &nobody_;
  }
}

}  // namespace samestep::tcp
