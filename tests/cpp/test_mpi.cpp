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

TEST_CASE("mpi: groups of MPI are freed, whatever fails") {
  const auto mpi = library_of(0);
  const int before = fake_mpi().groups();
  mpi->create_group(mpi->facts().comm_world, {0, 1}, 4);
  CHECK(fake_mpi().groups() == before);
  for (const char* call : {"MPI_Comm_group", "MPI_Group_incl", "MPI_Comm_create_group"}) {
    const Failing failing(call);
    CHECK_THROWS_WITH_AS(mpi->create_group(mpi->facts().comm_world, {0, 1}, 4),
                         (std::string(call) + " failed: the stand-in was told to fail").c_str(), Error);
    CHECK(fake_mpi().groups() == before);
  }
}

}  // namespace samestep
