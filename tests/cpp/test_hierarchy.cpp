#include <doctest/doctest.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>

#include "collective_calls.h"
#include "core/error.h"
#include "hierarchy/hierarchical_communicator.h"
#include "hierarchy/hierarchical_plan.h"
#include "kernels/reduce.h"
#include "local_network.h"
#include "thread_peers.h"
#include "uneven.h"

using namespace samestep;

namespace {

using Hosts = std::vector<int>;  // by rank, the number of its host

std::vector<RankLocation> ranks_on_hosts(const Hosts& hosts) {
  std::vector<RankLocation> topology;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto before = std::count(hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(rank), hosts[rank]);
    topology.push_back({hosts[rank], static_cast<int>(before)});
  }
  return topology;
}

/// Threads as ranks of hosts that only messages connect.
struct Region {
  Region(Hosts where, Reach how, std::size_t segment_bytes = 4096)
      : hosts(std::move(where)),
        reach(how),
        piece(segment_bytes),
        network(std::make_shared<LocalNetwork>(static_cast<int>(hosts.size()))) {
    for (const int host : hosts) states.try_emplace(host, std::make_shared<ThreadPeers::SharedState>());
  }
  int size() const { return static_cast<int>(hosts.size()); }
  std::shared_ptr<Communicator> join(int rank) {
    const int number = hosts[static_cast<std::size_t>(rank)];
    const std::vector<RankLocation> topology = ranks_on_hosts(hosts);
    const auto n_here = static_cast<int>(std::count(hosts.begin(), hosts.end(), number));
    std::shared_ptr<LocalPeers> host;
    if (n_here > 1) {
      const int place = topology[static_cast<std::size_t>(rank)].local_rank;
      host = std::make_shared<ThreadPeers>(states.at(number), place, n_here, reach);
    }
    ExchangeOptions options;
    options.oversubscribed = true;
    options.inline_limit = 256;
    options.segment_bytes = piece;
    options.algorithm = algorithm;
    auto engine = std::make_shared<ProgressEngine>(std::make_unique<LocalTransport>(network, rank), options);
    return HierarchicalCommunicator::over(std::move(engine), topology, std::move(host), soon());
  }
  Hosts hosts;
  Reach reach;
  std::size_t piece;
  std::optional<Algorithm> algorithm = {};
  std::shared_ptr<LocalNetwork> network;
  std::map<int, std::shared_ptr<ThreadPeers::SharedState>> states;
};

const Hosts kLayouts[] = {{0, 1}, {0, 0, 1, 1}, {0, 1, 1, 2}, {0, 1, 0, 1}, {0, 0, 0, 1}};

Floats reduced(const std::vector<const Floats*>& terms, ReduceOp op, std::size_t n_ranks) {
  std::vector<kernels::Input> given;
  for (const Floats* term : terms) given.push_back({term->data()});
  Floats result(terms[0]->size());
  void* const out = result.data();
  kernels::reduce_into(DType::float32, op, given, {&out, 1}, result.size(), static_cast<double>(n_ranks));
  return result;
}

/// What ranks bring, and what comes of it: by host and then by rank, each in pairwise order; where hosts keep the
/// order, all ranks in pairwise order.
UnevenTable uneven_table(const Hosts& hosts, std::span<const std::size_t> counts, std::span<const ReduceOp> ops) {
  const bool flat_order = Topology(ranks_on_hosts(hosts)).keeps_order();
  return {static_cast<int>(hosts.size()), counts, ops, [&](const std::vector<Floats>& inputs, ReduceOp op) {
            std::vector<Floats> partial;
            for (const int host : std::set<int>(hosts.begin(), hosts.end())) {
              std::vector<const Floats*> here;
              for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
                if (hosts[rank] == host) here.push_back(&inputs[rank]);
              }
              partial.push_back(reduced(here, op == ReduceOp::avg ? ReduceOp::sum : op, 0));
            }
            std::vector<const Floats*> terms;
            for (const Floats& term : flat_order ? inputs : partial) terms.push_back(&term);
            return reduced(terms, op, hosts.size());
          }};
}

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max};
constexpr ReduceOp kSum[] = {ReduceOp::sum};
constexpr std::size_t kCounts[] = {0, 1, 5, 65, 1000, 4097, 20'003};
constexpr std::size_t kLong = 5000;  // longer ones take time under the sanitizers: over memory that is reached only

}  // namespace

TEST_CASE("hierarchy: hosts are numbered by their first ranks, and lanes are those of the smallest") {
  const Topology topology({{7, 0}, {3, 0}, {7, 1}, {3, 1}, {7, 2}});
  CHECK(topology.n_hosts() == 2);
  CHECK(topology.host_of(4) == 0);
  CHECK(topology.host_of(1) == 1);
  CHECK(topology.local_index(4) == 2);
  CHECK(topology.lanes() == 2);
  CHECK(!topology.keeps_order());
  CHECK(Topology(ranks_on_hosts({0, 0, 1, 1})).keeps_order());
  CHECK(Topology(ranks_on_hosts({0, 1, 2})).keeps_order());
  CHECK(!Topology(ranks_on_hosts({0, 1, 0, 1})).keeps_order());        // not consecutive
  CHECK(!Topology(ranks_on_hosts({0, 0, 1})).keeps_order());           // not equal
  CHECK(!Topology(ranks_on_hosts({0, 0, 0, 1, 1, 1})).keeps_order());  // no power of two
}

TEST_CASE("hierarchy: a plan covers all elements once, and each host has a leader") {
  for (const Hosts& hosts : kLayouts) {
    const Topology topology(ranks_on_hosts(hosts));
    const auto n_ranks = hosts.size();
    for (const CollectiveType verb : {CollectiveType::allreduce, CollectiveType::reduce, CollectiveType::bcast,
                                      CollectiveType::reduce_scatter, CollectiveType::allgather}) {
      const bool blocks = verb == CollectiveType::reduce_scatter || verb == CollectiveType::allgather;
      for (const std::size_t count : kCounts) {
        const HierarchicalPlan plan(topology, verb, 1, count, 300);
        std::vector<int> covered(count * (blocks ? n_ranks : 1));
        std::set<int> leaders;
        for (std::size_t k = 0; k < plan.chunks(); ++k) {
          const HierarchicalChunk chunk = plan.chunk(k);
          REQUIRE(chunk.count > 0);
          REQUIRE(chunk.count <= plan.longest());
          for (std::size_t i = 0; i < chunk.count; ++i) ++covered[std::max(chunk.in_offset, chunk.out_offset) + i];
          for (int host = 0; host < topology.n_hosts(); ++host) {
            REQUIRE(topology.host_of(plan.leader(k, host)) == host);
            leaders.insert(plan.leader(k, host));
          }
        }
        REQUIRE(std::count(covered.begin(), covered.end(), 1) == static_cast<std::ptrdiff_t>(covered.size()));
        for (int rank = 0; rank < static_cast<int>(n_ranks); ++rank) {
          REQUIRE(plan.has_work(rank) == leaders.contains(rank));
        }
      }
    }
  }
}

TEST_CASE("hierarchy: all verbs over pretended hosts, to the bit") {
  for (const Hosts& hosts : kLayouts) {
    const UnevenTable values = uneven_table(hosts, kCounts, kOps);
    for (const Reach reach : {Reach::cma, Reach::shared, Reach::heap}) {
      if (reach != Reach::cma && hosts == kLayouts[0]) continue;  // each host has one rank
      Region region(hosts, reach);
      const int size = region.size();
      as_threads(size, [&](int rank) {
        const auto group = region.join(rank);
        for (const std::size_t count : kCounts) {
          if (count > kLong && reach != Reach::cma) continue;
          for (const ReduceOp op : kOps) {
            const Floats& expected = values.reduced(count, op);
            Floats all = values.of(rank, count), into(count);
            allreduce(*group, buffer(all), buffer(into), {op}, shape(all))->wait(soon());
            REQUIRE(into == expected);
            REQUIRE(all == values.of(rank, count));
            allreduce(*group, buffer(all), buffer(all), {op}, shape(all))->wait(soon());
            REQUIRE(all == expected);
          }
          const Floats& sum = values.reduced(count, ReduceOp::sum);
          for (int root = count > kLong ? size - 1 : 0; root < size; ++root) {
            Floats one = values.of(rank, count);
            reduce(*group, buffer(one), buffer(one), {}, root, shape(one))->wait(soon());
            REQUIRE(one == (rank == root ? sum : values.of(rank, count)));
            Floats sent = values.of(rank, count);
            bcast(*group, buffer(sent), root, shape(sent))->wait(soon());
            REQUIRE(sent == values.of(root, count));
          }
          const auto n = static_cast<std::size_t>(size), me = static_cast<std::size_t>(rank);
          Floats everyone(n * count), mine = values.of(rank, count);
          allgather(*group, buffer(mine), buffer(everyone), shape(mine))->wait(soon());
          for (int r = 0; r < size; ++r) {
            const Floats& theirs = values.of(r, count);
            REQUIRE(
                std::equal(theirs.begin(), theirs.end(), everyone.begin() + r * static_cast<std::ptrdiff_t>(count)));
          }
          // Each block of rank r is its values: each rank gets the same sum, in place.
          Floats blocks;
          for (int r = 0; r < size; ++r) blocks.insert(blocks.end(), mine.begin(), mine.end());
          const Buffer own{blocks.data() + me * count, count, DType::float32};
          reduce_scatter(*group, buffer(blocks), own, {}, Shape::flat(count))->wait(soon());
          REQUIRE(std::equal(sum.begin(), sum.end(), blocks.begin() + static_cast<std::ptrdiff_t>(me * count)));
        }
        group->close(soon());
      });
    }
  }
}

TEST_CASE("hierarchy: recursive halving and doubling over hosts give the same bits") {
  constexpr std::size_t kSome[] = {65, 1000, 20'003};
  for (const Hosts& hosts :
       {Hosts{0, 1}, Hosts{0, 0, 1, 1, 2, 2}, Hosts{0, 1, 1, 2}, Hosts{0, 1, 2, 3, 4}, Hosts{0, 0, 1, 2, 2, 2, 3}}) {
    const UnevenTable values = uneven_table(hosts, kSome, kOps);
    for (const Reach reach : {Reach::cma, Reach::shared, Reach::heap}) {
      for (const Algorithm algorithm : {Algorithm::recursive_halving, Algorithm::recursive_doubling}) {
        Region region(hosts, reach, 512);
        region.algorithm = algorithm;
        as_threads(region.size(), [&](int rank) {
          const auto group = region.join(rank);
          for (const std::size_t count : kSome) {
            if (count > kLong && reach != Reach::cma) continue;
            for (const ReduceOp op : kOps) {
              const Floats& expected = values.reduced(count, op);
              Floats all = values.of(rank, count), into(count);
              allreduce(*group, buffer(all), buffer(into), {op}, shape(all))->wait(soon());
              REQUIRE(into == expected);
              REQUIRE(all == values.of(rank, count));
              allreduce(*group, buffer(all), buffer(all), {op}, shape(all))->wait(soon());
              REQUIRE(all == expected);
            }
            std::vector<double> scaled(count, 1.0);
            const Buffer of_scaled{scaled.data(), count, DType::float64};
            allreduce(*group, of_scaled, of_scaled, {ReduceOp::premul, 1.0 + rank}, Shape::flat(count))->wait(soon());
            REQUIRE(scaled == std::vector<double>(count, region.size() * (region.size() + 1) / 2));
          }
          group->close(soon());
        });
      }
    }
  }
}

TEST_CASE("hierarchy: factors, integers, half types, bools") {
  Region region({0, 1, 1, 2}, Reach::cma);
  as_threads(region.size(), [&](int rank) {
    const auto group = region.join(rank);
    constexpr std::size_t kCount = 5003;
    std::vector<double> scaled(kCount, 1.0);
    const Buffer of_scaled{scaled.data(), kCount, DType::float64};
    allreduce(*group, of_scaled, of_scaled, {ReduceOp::premul, 1.0 + rank}, Shape::flat(kCount))->wait(soon());
    REQUIRE(scaled == std::vector<double>(kCount, 10.0));
    std::vector<std::int32_t> whole(kCount, 7 * rank);  // 0 + 7 + 14 + 21 = 42
    const Buffer of_whole{whole.data(), kCount, DType::int32};
    allreduce(*group, of_whole, of_whole, {ReduceOp::avg}, Shape::flat(kCount))->wait(soon());
    REQUIRE(whole == std::vector<std::int32_t>(kCount, 10));
    std::vector<std::uint16_t> half(kCount,
                                    rank == 0 ? 0x3f80 : 0x3b80);  // 1 and 2^-8: summed in float32, rounded once
    const Buffer of_half{half.data(), kCount, DType::bfloat16};
    allreduce(*group, of_half, of_half, {}, Shape::flat(kCount))->wait(soon());
    REQUIRE(half == std::vector<std::uint16_t>(kCount, 0x3f82));  // 1 + 3 * 2^-8, halfway, to even
    std::vector<std::uint8_t> any(kCount, rank == 2 ? 5 : 0);
    const Buffer of_any{any.data(), kCount, DType::bool_};
    allreduce(*group, of_any, of_any, {}, Shape::flat(kCount))->wait(soon());
    REQUIRE(any == std::vector<std::uint8_t>(kCount, 1));
    group->close(soon());
  });
}

TEST_CASE("hierarchy: each byte crosses between hosts once") {
  constexpr std::size_t kCount = 32'768;
  Region region({0, 0, 1, 1}, Reach::cma);
  std::atomic<std::uint64_t> sent = 0;
  as_threads(region.size(), [&](int rank) {
    const auto group = region.join(rank);
    Floats all(kCount);
    const std::uint64_t before = group->counters().bytes;
    allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
    sent += group->counters().bytes - before;
    group->close(soon());
  });
  CHECK(sent >= 2 * 4 * kCount);        // one buffer out of each host,
  CHECK(sent < 2 * 4 * kCount + 2000);  // and what opens and ends the operation
}

TEST_CASE("hierarchy: many pending operations, finished in any order") {
  Region region({0, 1, 1, 2}, Reach::shared, 512);
  constexpr std::size_t kMany = 24;
  std::vector<std::size_t> counts;
  for (std::size_t i = 0; i < kMany; ++i) counts.push_back(1 + 97 * i);
  const UnevenTable table = uneven_table(region.hosts, counts, kSum);
  as_threads(region.size(), [&](int rank) {
    const auto group = region.join(rank);
    std::vector<Floats> values;
    std::vector<Communicator::WorkPtr> works;
    for (const std::size_t count : counts) values.push_back(table.of(rank, count));
    for (Floats& v : values) works.push_back(allreduce(*group, buffer(v), buffer(v), {}, shape(v)));
    for (std::size_t i = kMany; i-- > 0;) {
      works[(i * 7) % kMany]->wait(soon());
      REQUIRE(values[(i * 7) % kMany] == table.reduced(counts[(i * 7) % kMany], ReduceOp::sum));
    }
    group->close(soon());
  });
}

TEST_CASE("hierarchy: a difference raises the same text on every rank, and the group stays usable") {
  Region region({0, 0, 1, 1}, Reach::cma);
  constexpr std::size_t kCount[] = {2000};
  const UnevenTable table = uneven_table(region.hosts, kCount, kSum);
  std::vector<std::string> texts(4);
  as_threads(region.size(), [&](int rank) {
    const auto group = region.join(rank);
    for (const std::size_t count : {std::size_t{3}, std::size_t{5000}}) {
      Floats odd(count + (rank == 2 ? 1 : 0));
      try {
        allreduce(*group, buffer(odd), buffer(odd), {}, shape(odd))->wait(soon());
      } catch (const MismatchError& error) {
        texts[static_cast<std::size_t>(rank)] += error.what();
      }
      Floats all = table.of(rank, 2000);
      allreduce(*group, buffer(all), buffer(all), {}, shape(all))->wait(soon());
      REQUIRE(all == table.reduced(2000, ReduceOp::sum));
    }
    group->close(soon());
  });
  CHECK(texts[0].find("float32[5001]") != std::string::npos);
  for (const std::string& text : texts) CHECK(text == texts[0]);
}

TEST_CASE("hierarchy: a missing rank is named, and then no rank accesses memory that was withdrawn") {
  Region region({0, 0, 1, 1}, Reach::cma);
  std::atomic<int> gave_up = 0;
  as_threads(region.size(), [&](int rank) {
    const auto group = region.join(rank);
    auto values = std::make_unique<Floats>(5000, 1.0F);
    if (rank == 3) {
      while (gave_up != 3) std::this_thread::yield();
      // The headers of the others are here, with addresses of memory that is free by now.
      CHECK_THROWS_AS(allreduce(*group, buffer(*values), buffer(*values), {}, shape(*values))->wait(soon()),
                      PeerLostError);
      return;
    }
    const auto work = allreduce(*group, buffer(*values), buffer(*values), {}, shape(*values));
    try {
      work->wait(Deadline::after(Seconds(0.05)));
      FAIL("the deadline should have passed");
    } catch (const TimeoutError& error) {
      CHECK(std::string(error.what()).find(" 3") != std::string::npos);
      group->abandon(std::current_exception(), error.what());
    } catch (const PeerLostError&) {  // another survivor timed out first, and counted this rank as late
    }
    values = nullptr;
    ++gave_up;
  });
}
