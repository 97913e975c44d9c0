#pragma once

#include <string>

namespace samestep {

/// What is known about this process and machine before a backend is chosen. Gathered once, by Python.
struct Facts {
  std::string launcher;                ///< "openmpi", "hydra", "slurm", "srun", "samestep", "torchrun", or "" = nobody
  int launcher_size = 1;               ///< ranks the launcher says there are
  bool mpi_loadable = false;           ///< mpi4py and an MPI library load
  std::string mpi_detail;              ///< library and version, or why not
  bool nccl_loadable = false;          ///< NCCL or RCCL loads
  std::string nccl_detail;             ///< library and version, or what was looked for
  int devices = 0;                     ///< usable CUDA or HIP devices
  std::string device_detail;           ///< names, or what was looked for
  bool every_rank_has_device = false;  ///< all ranks of the job see at least one device
};

/// The backend to use and why, in one sentence for `samestep doctor`.
struct Choice {
  std::string backend;  ///< "mpi", "nccl" or "native"
  std::string host;     ///< the backend that carries host arrays: "mpi" or "native"
  std::string reason;
};

/// Chooses as docs/backends.md says: under an MPI launcher MPI, wrapped by NCCL where every rank has a
/// device; under torchrun-style variables or `samestep run` native; alone native with one worker, and so
/// for a single rank of an MPI launcher where no MPI loads. `requested` ("mpi", "nccl", "native", "" =
/// choose) is obeyed.
///
/// Pure. Throws UnavailableError where the requested backend, or the one the launcher needs, cannot be
/// used: the text lists what was looked for and the cure. Throws InvalidArgumentError for an unknown name.
Choice choose(const Facts& facts, const std::string& requested);

/// What the loaded MPI says, for the comparison with the launcher.
struct World {
  int size = 1;
  std::string library;  ///< path and version of the MPI library
};

/// Throws UnavailableError, naming launcher, both sizes, library and cure, where the launcher says n > 1
/// ranks but the world has another size: the launcher of one MPI with the library of another.
void check_launch(const Facts& facts, const World& world);

}  // namespace samestep
