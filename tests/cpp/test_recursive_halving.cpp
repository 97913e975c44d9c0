#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "collective_calls.h"
#include "collectives/exchange_communicator.h"
#include "core/error.h"
#include "kernels/reduce.h"
#include "local_network.h"
#include "uneven.h"

using namespace samestep;

namespace {

/// The expected result of all ranks' values; the factor of a rank is 1 more than its number.
Floats reduced(const std::vector<Floats>& given, ReduceOp op = ReduceOp::sum) {
  std::vector<kernels::Input> terms;
  for (const Floats& values : given) terms.push_back({values.data(), static_cast<double>(terms.size() + 1)});
  Floats result(given[0].size());
  kernels::reduce(DType::float32, op, terms, result.data(), result.size());
  return result;
}

ExchangeOptions options_of(Algorithm algorithm, std::size_t segment_bytes) {
  ExchangeOptions options;
  options.oversubscribed = true;
  options.inline_limit = 64;
  options.segment_bytes = segment_bytes;
  options.algorithm = algorithm;
  return options;
}

}  // namespace

TEST_CASE("recursive: over messages, to the bit, in several segments and in one") {
  constexpr std::size_t kCounts[] = {17, 1000, 5003, 20'003};
  constexpr std::size_t kLong = 5003;  // longer ones take time under the sanitizers: on seven ranks only
  constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::premul};
  for (const int size : {2, 3, 4, 5, 7, 8}) {
    const UnevenTable values(size, kCounts, kOps, reduced);
    for (const Algorithm algorithm : {Algorithm::recursive_halving, Algorithm::recursive_doubling}) {
      const auto network = std::make_shared<LocalNetwork>(size);
      as_threads(size, [&](int rank) {
        ExchangeCommunicator group(std::make_unique<LocalTransport>(network, rank, /*max_message=*/700),
                                   options_of(algorithm, 512));
        for (const std::size_t count : kCounts) {
          if (count > kLong && size != 7) continue;
          for (const ReduceOp op : kOps) {
            const Reduction reduction{op, 1.0 + rank};
            const Floats& expected = values.reduced(count, op);
            Floats all = values.of(rank, count), into(count);
            allreduce(group, buffer(all), buffer(into), reduction, Shape::flat(count))->wait(soon());
            REQUIRE(into == expected);
            REQUIRE(all == values.of(rank, count));
            allreduce(group, buffer(all), buffer(all), reduction, Shape::flat(count))->wait(soon());
            REQUIRE(all == expected);
          }
        }
        group.close(soon());
      });
    }
  }
}

TEST_CASE("recursive: many pending operations, unsupported types, and an end by deadline") {
  const int size = 5;
  std::vector<std::size_t> counts;
  for (std::size_t i = 0; i < 20; ++i) counts.push_back(20 + 97 * i);
  constexpr ReduceOp kSum[] = {ReduceOp::sum};
  const UnevenTable table(size, counts, kSum, reduced);
  const auto network = std::make_shared<LocalNetwork>(size);
  as_threads(size, [&](int rank) {
    ExchangeCommunicator group(std::make_unique<LocalTransport>(network, rank),
                               options_of(Algorithm::recursive_halving, 256));
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (const std::size_t count : counts) values.push_back(table.of(rank, count));
    for (Floats& v : values) works.push_back(allreduce(group, buffer(v), buffer(v), {}, Shape::flat(v.size())));
    for (std::size_t i = 20; i-- > 0;) {
      works[(i * 7) % 20]->wait(soon());
      REQUIRE(values[(i * 7) % 20] == table.reduced(counts[(i * 7) % 20], ReduceOp::sum));
    }
    std::vector<std::int32_t> whole(1001, 7 * rank);  // 0 + 7 + ... + 28 = 70
    const Buffer of_whole{whole.data(), whole.size(), DType::int32};
    allreduce(group, of_whole, of_whole, {ReduceOp::avg}, Shape::flat(whole.size()))->wait(soon());
    REQUIRE(whole == std::vector<std::int32_t>(1001, 14));
    barrier(group)->wait(soon());
    if (rank == 4) return;  // its partners learn of it by their deadline, or from each other
    Floats last(1000);
    const auto work = allreduce(group, buffer(last), buffer(last), {}, Shape::flat(last.size()));
    try {
      work->wait(Deadline::after(Seconds(0.2)));
      FAIL("rank 4 is not here");
    } catch (const TimeoutError& error) {
      CHECK(std::string(error.what()).find(" 4") != std::string::npos);
      group.abandon(std::current_exception(), error.what());
    } catch (const PeerLostError&) {
      group.abandon(std::current_exception(), "a peer gave up");
    }
  });
}
