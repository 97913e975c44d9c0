#pragma once

#include <vector>

#include "exchange/operation.h"

namespace samestep {

/// A collective that only moves data: every pair of ranks exchanges at most one run of bytes each way.
/// Short runs travel with the headers, long ones in messages of their own.
class Movement : public Collective {
 public:
  /// What goes to one rank and comes from it. The entry of this rank itself is a local copy.
  struct Route {
    const std::byte* out = nullptr;
    std::size_t out_nbytes = 0;
    std::byte* in = nullptr;
    std::size_t in_nbytes = 0;
  };

  /// `routes`: one entry per rank.
  Movement(std::shared_ptr<Engine> engine, const Signature& signature, std::vector<Route> routes)
      : Collective(std::move(engine), signature), routes_(std::move(routes)), receives_(routes_.size()) {}

  /// Most bytes that travel with a header.
  static std::size_t short_nbytes(Engine& engine, Verb verb);

 protected:
  void announce(std::uint64_t digest) override;
  void start_work() override;
  bool work() override;
  std::vector<int> awaited() override;
  void give_up() override;

  bool is_short(std::size_t nbytes) { return nbytes <= short_nbytes(engine(), signature().verb); }
  [[noreturn]] void throw_wrong_size(int peer, std::size_t sent, std::size_t expected) const;

  static constexpr std::size_t kForPlaces = 64;  // of a header's room are left to those who need it
  static std::size_t less_places(std::size_t nbytes) { return nbytes > kForPlaces ? nbytes - kForPlaces : 0; }

  std::vector<Route> routes_;
  std::vector<Requests> receives_;  // by rank
  Requests sends_;
};

}  // namespace samestep
