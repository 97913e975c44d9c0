#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "collective_calls.h"
#include "contributions.h"
#include "core/error.h"

// Laws of a communicator that hold over every transport. `world.join(rank)` gives each thread of a rank its group.

namespace samestep {

/// Rank 1 gives one element more than the others.
template <class World>
void check_that_a_difference_is_reported(World& world, int size, std::size_t count) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    Floats odd(rank == 1 ? count + 1 : count);
    try {
      const CollectiveArgs call{CollectiveType::allreduce, buffer(odd), buffer(odd), {}, -1, shape(odd)};
      if (const auto work = group->run(call)) work->wait(soon());
    } catch (const MismatchError& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
    Floats all = contribution(rank, 2000);
    allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
    REQUIRE(all == sum(size, 2000));
    group->close(soon());
  });
  CHECK(texts[0].find("float32[" + std::to_string(count + 1) + "]") != std::string::npos);
  for (const std::string& text : texts) CHECK(text == texts[0]);
}

/// Rank 0 receives from the others: in order, from any source, with any tag, and with other counts than were sent.
template <class World>
void check_point_to_point(World& world, int size, std::initializer_list<std::size_t> counts) {
  as_threads(size, [&](int rank) {
    const auto group = world.join(rank);
    for (const std::size_t count : counts) {
      if (rank != 0) {
        Floats values = contribution(rank, count);
        group->send(buffer(values), 0, rank)->wait(soon());
        group->send(buffer(values), 0, 7)->wait(soon());
        if (count > 0) group->send(buffer(values), 0, 8)->wait(soon());
      } else {
        for (int source = size - 1; source > 0; --source) {
          Floats values(count);
          const auto work = group->recv(buffer(values), source, kAnyTag);
          work->wait(soon());
          REQUIRE(work->status().tag == source);
          REQUIRE(values == contribution(source, count));
        }
        for (int i = 1; i < size; ++i) {
          Floats longer(count + 1);
          const auto work = group->recv(buffer(longer), kAnySource, 7);
          work->wait(soon());
          REQUIRE(work->status().count == count);
        }
        for (int i = 1; count > 0 && i < size; ++i) {
          Floats shorter(count - 1);
          const auto work = group->recv(buffer(shorter), kAnySource, 8);
          REQUIRE_THROWS_AS(work->wait(soon()), MismatchError);
        }
      }
      barrier(*group)->wait(soon());
    }
    group->close(soon());
  });
}

}  // namespace samestep
