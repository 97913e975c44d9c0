#include <doctest/doctest.h>

#include <string>

#include "core/error.h"
#include "select/choice.h"

namespace samestep {
namespace {

Facts started_by(const std::string& launcher, int size) {
  Facts facts;
  facts.launcher = launcher;
  facts.launcher_size = size;
  facts.mpi_detail = "no mpi4py";
  facts.nccl_detail = "no libnccl.so.2";
  facts.device_detail = "no libcuda.so.1";
  return facts;
}

Facts with_mpi(Facts facts) {
  facts.mpi_loadable = true;
  facts.mpi_detail = "Open MPI 5 at /lib/libmpi.so.40";
  return facts;
}

Facts with_nccl(Facts facts) {
  facts.nccl_loadable = true;
  facts.nccl_detail = "NCCL 2.28";
  return facts;
}

Facts with_devices(Facts facts, int devices, bool every_rank) {
  facts.devices = devices;
  facts.every_rank_has_device = every_rank;
  return facts;
}

template <class Error>
std::string error_text(const Facts& facts, const std::string& requested) {
  try {
    return "chose " + choose(facts, requested).backend;
  } catch (const Error& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Row {
  const char* what;
  Facts facts;
  std::string requested;
  std::string backend;
  std::string host;
};

TEST_CASE("choose: the table") {
  const Facts four = with_mpi(started_by("openmpi", 4));
  const Row kRows[] = {
      {"alone", started_by("", 1), "", "native", "native"},
      {"alone, MPI installed", with_mpi(started_by("", 1)), "", "native", "native"},
      {"alone, with devices", with_devices(with_nccl(started_by("", 1)), 2, true), "", "native", "native"},
      {"Open MPI", four, "", "mpi", "mpi"},
      {"MPICH", with_mpi(started_by("hydra", 2)), "", "mpi", "mpi"},
      {"Slurm", with_mpi(started_by("slurm", 3)), "", "mpi", "mpi"},
      {"one rank by mpirun without MPI", started_by("openmpi", 1), "", "native", "native"},
      {"MPI and a device for all", with_devices(with_nccl(four), 4, true), "", "nccl", "mpi"},
      {"MPI and devices, no NCCL", with_devices(four, 4, true), "", "mpi", "mpi"},
      {"MPI and devices for some", with_devices(with_nccl(four), 4, false), "", "mpi", "mpi"},
      {"samestep run", with_mpi(started_by("samestep", 2)), "", "native", "native"},
      {"torchrun with devices", with_devices(with_nccl(started_by("torchrun", 2)), 2, true), "", "native", "native"},
      {"mpi asked for, alone", with_mpi(started_by("", 1)), "mpi", "mpi", "mpi"},
      {"mpi asked for in spite of devices", with_devices(with_nccl(four), 4, true), "mpi", "mpi", "mpi"},
      {"native asked for under mpirun", four, "native", "native", "native"},
      {"nccl asked for under mpirun", with_devices(with_nccl(four), 1, true), "nccl", "nccl", "mpi"},
      {"nccl asked for, alone", with_devices(with_nccl(started_by("", 1)), 1, false), "nccl", "nccl", "native"},
      {"nccl asked for by torchrun", with_devices(with_nccl(started_by("torchrun", 2)), 1, true), "nccl", "nccl",
       "native"},
  };
  for (const Row& row : kRows) {
    CAPTURE(row.what);
    const Choice choice = choose(row.facts, row.requested);
    CHECK(choice.backend == row.backend);
    CHECK(choice.host == row.host);
    CHECK(!choice.reason.empty());
  }
}

TEST_CASE("choose: a launcher that needs MPI without MPI says what is missing and the cure") {
  for (const char* launcher : {"openmpi", "hydra", "slurm"}) {
    const std::string text = error_text<UnavailableError>(started_by(launcher, 4), "");
    CAPTURE(text);
    CHECK(contains(text, "no mpi4py"));
    CHECK(contains(text, "pip install"));
  }
}

TEST_CASE("choose: nccl lists everything that is missing at once") {
  const std::string text = error_text<UnavailableError>(started_by("", 1), "nccl");
  CAPTURE(text);
  CHECK(contains(text, "no libnccl.so.2"));
  CHECK(contains(text, "no libcuda.so.1"));
  CHECK(contains(text, "pip install nvidia-nccl"));

  const Facts some = with_devices(with_nccl(with_mpi(started_by("openmpi", 4))), 2, false);
  CHECK(contains(error_text<UnavailableError>(some, "nccl"), "A rank of this job sees no device"));
}

TEST_CASE("choose: names that mean nothing") {
  CHECK(contains(error_text<InvalidArgumentError>({}, "gloo"), "'mpi', 'nccl' and 'native'"));
}

std::string launch_complaint(const Facts& facts, const World& world) {
  try {
    check_launch(facts, world);
    return "";
  } catch (const UnavailableError& error) {
    return error.what();
  }
}

TEST_CASE("check_launch: silent where launcher and world agree, or nobody launched") {
  CHECK(launch_complaint(started_by("openmpi", 4), {4, "lib"}) == "");
  CHECK(launch_complaint(started_by("openmpi", 1), {1, "lib"}) == "");
  CHECK(launch_complaint(started_by("", 1), {1, "lib"}) == "");
}

TEST_CASE("check_launch: launcher, both sizes, library and cure are named") {
  const World world{1, "/lib/libmpich.so.12 (MPICH 4.2)"};
  const std::pair<const char*, const char*> kVariables[] = {{"openmpi", "OMPI_COMM_WORLD_SIZE=4"},
                                                            {"hydra", "PMI_SIZE=4"},
                                                            {"slurm", "SLURM_NTASKS=4"},
                                                            {"torchrun", "WORLD_SIZE=4"}};
  for (const auto& [launcher, variable] : kVariables) {
    const std::string text = launch_complaint(started_by(launcher, 4), world);
    CAPTURE(text);
    CHECK(contains(text, variable));
    CHECK(contains(text, "has 1: /lib/libmpich.so.12 (MPICH 4.2)"));
    CHECK(contains(text, "samestep run -n 4 --mpi script.py"));
  }
  CHECK(!launch_complaint(started_by("openmpi", 4), {2, "lib"}).empty());
}

}  // namespace
}  // namespace samestep
