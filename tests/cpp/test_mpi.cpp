#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collective_calls.h"
#include "contributions.h"
#include "core/error.h"
#include "local_network.h"
#include "local_ports.h"
#include "mpi/mpi_library.h"
#include "mpi/mpi_transport.h"
#include "os/dynamic_library.h"

// Over a stand-in of an MPI library, which does what a real one does rarely.

namespace samestep {
namespace {

struct FakeMpi {
  void (*tests_of_cancelled)(int);
  void (*fail)(const char*);
  int (*groups)();
};

const FakeMpi& fake_mpi() {
  static const FakeMpi only = [] {
    static const OpenedLibrary library(FAKE_MPI);
    FakeMpi found{};
    REQUIRE((library.find("fakeMpiTestsOfCancelled", found.tests_of_cancelled) &&
             library.find("fakeMpiFail", found.fail) && library.find("fakeMpiGroups", found.groups)));
    return found;
  }();
  return only;
}

/// Calls of MPI that fail, for a scope.
class Failing {
 public:
  explicit Failing(const char* names) { fake_mpi().fail(names); }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
  ~Failing() { fake_mpi().fail(""); }
};

std::shared_ptr<MpiLibrary> library_of(int rank) {
  fake_mpi().tests_of_cancelled(0);
  MpiFacts facts;
  facts.module_path = FAKE_MPI;
  facts.comm_nbytes = sizeof(int);
  facts.status_nbytes = 5 * sizeof(int);
  facts.comm_world = static_cast<std::uintptr_t>(1000 + rank);
  facts.request_null = 7;
  facts.any_source = -2;
  return MpiLibrary::open(facts);
}

std::shared_ptr<ExchangeCommunicator> join(int rank) {
  ExchangeOptions options;
  options.oversubscribed = true;
  return std::dynamic_pointer_cast<ExchangeCommunicator>(open_mpi_world(library_of(rank), options, soon()));
}

}  // namespace

TEST_CASE("mpi: a cancelled receive is tested until MPI has cancelled it") {
  const auto mpi = library_of(0);
  const MpiLibrary::Handle comm = mpi->facts().comm_world;
  char room = 0;
  for (const int n : {0, 1, 7}) {
    MpiLibrary::Handle request = mpi->receive(comm, &room, 1, 0, 5);
    fake_mpi().tests_of_cancelled(n);
    CHECK(mpi->cancel(request));
    CHECK(request == mpi->facts().request_null);
  }
  MpiLibrary::Handle request = mpi->receive(comm, &room, 1, 0, 5);
  fake_mpi().tests_of_cancelled(1 << 30);  // it returns, nevertheless
  CHECK_FALSE(mpi->cancel(request));
  CHECK(request != mpi->facts().request_null);
}

TEST_CASE("mpi: a closed group keeps the memory of receives that MPI has not cancelled, and no other") {
  for (const int n : {0, 1 << 30}) {
    std::mutex mutex;
    std::vector<std::weak_ptr<ProgressEngine>> engines;
    as_threads(2, [&](int rank) {
      const auto group = join(rank);
      Floats x = contribution(rank, 5);
      allreduce(*group, buffer(x), buffer(x), {}, shape(x))->wait(soon());
      REQUIRE(x == sum(2, 5));
      fake_mpi().tests_of_cancelled(n);
      group->close(soon());
      const std::lock_guard lock(mutex);
      engines.emplace_back(group->engine_of_group());
    });
    for (const auto& engine : engines) CHECK(engine.expired() == (n == 0));
  }
}

TEST_CASE("mpi: groups of MPI are freed, whatever fails") {
  const auto mpi = library_of(0);
  const int before = fake_mpi().groups();
  mpi->create_group(mpi->facts().comm_world, {0, 1}, 4);
  CHECK(fake_mpi().groups() == before);
  for (const char* call : {"MPI_Comm_group", "MPI_Group_incl", "MPI_Comm_create_group"}) {
    const Failing failing(call);
    CHECK_THROWS_WITH_AS(mpi->create_group(mpi->facts().comm_world, {0, 1}, 4),
                         (std::string(call) + " failed: the stand-in has to fail").c_str(), Error);
    CHECK(fake_mpi().groups() == before);
  }
}

TEST_CASE("mpi: an error of MPI in a watched world holds for its groups, which other threads use") {
  std::atomic<int> n_made = 0;
  std::vector<PeerWatch::Place> places(2, {.address = "127.0.0.1", .where = "node1"});
  std::vector<Fd> listening;  // nobody has died
  for (PeerWatch::Place& place : places) listening.push_back(open_port(place.port));
  Fd reserved = open_port(places[0].reserved_port, -1);
  std::unique_ptr<Failing> failing;
  as_threads(2, [&](int rank) {
    const std::shared_ptr<ExchangeCommunicator> over_mpi = join(rank);
    const std::shared_ptr<Communicator> world = over_mpi;
    if (rank == 0) {
      watch_ranks(*over_mpi, std::make_shared<PeerWatch>(std::move(listening[0]), std::move(reserved), places));
    }
    const auto part = world->split(0, rank, soon());
    ++n_made;
    if (rank == 1) return;
    for (const Deadline deadline = soon(); n_made < 2;) {
      REQUIRE(!deadline.passed());
      std::this_thread::yield();
    }
    Floats x(1), y(1);
    const auto first = world->recv(buffer(x), 1, 0), second = part->recv(buffer(y), 1, 0);
    // Relaxed: these must not order what the threads do in the groups, where ThreadSanitizer looks for races.
    std::atomic<int> n_polled = 0, n_ended = 0;
    std::atomic<bool> stop = false;
    const auto poll = [&](Work& work) {
      if (work.done()) n_ended.fetch_add(1, std::memory_order_relaxed);
    };
    std::thread elsewhere([&] {
      for (; !stop.load(std::memory_order_relaxed); n_polled.fetch_add(1, std::memory_order_relaxed)) poll(*second);
    });
    const auto poll_both = [&] {
      const int before = n_polled.load(std::memory_order_relaxed);
      while (n_polled.load(std::memory_order_relaxed) < before + 20) poll(*first);
    };
    poll_both();
    failing = std::make_unique<Failing>("MPI_Test MPI_Isend MPI_Irecv");
    poll_both();
    stop = true;
    elsewhere.join();
    CHECK(n_ended == 0);
    // Until the watch knows who has died, the error of MPI is no reason to end.
    for (const auto& work : {first, second}) {
      CHECK_THROWS_AS(work->wait(Deadline::after(Seconds(0.01))), TimeoutError);
    }
    for (const auto& group : {world, part}) {
      group->abandon(std::make_exception_ptr(PeerLostError("over")), "over");
    }
  });
}

}  // namespace samestep
