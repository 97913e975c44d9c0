#pragma once

#include <string>

namespace samestep {

/// The facts about this process and machine from which a backend is selected. Gathered once, by Python.
struct Facts {
  std::string launcher;                ///< "openmpi", "hydra", "slurm", "srun", "samestep", "torchrun", or "" for none
  int launcher_size = 1;               ///< number of ranks according to the launcher
  bool mpi_loadable = false;           ///< mpi4py and an MPI library load
  std::string mpi_detail;              ///< library and version, or why not
  bool nccl_loadable = false;          ///< NCCL or RCCL loads
  std::string nccl_detail;             ///< library and version, or what was looked for
  int devices = 0;                     ///< usable CUDA or HIP devices
  std::string device_detail;           ///< names, or what was looked for
  bool every_rank_has_device = false;  ///< all ranks of the job see at least one device
  bool has_pmi = false;                ///< the launcher offers PMI-1, through which ranks can meet without MPI
};

/// The backend to use and why, in one sentence for `samestep doctor`.
struct Choice {
  std::string backend;  ///< "mpi", "nccl" or "native"
  std::string host;     ///< the backend of host arrays: "mpi" or "native"
  std::string reason;
};

/// Selects as described in docs/backends.md: MPI under an MPI launcher, wrapped by NCCL if every rank has a device;
/// native under `samestep run` or torchrun-style variables, without a launcher, and, where no MPI library loads, for a
/// single rank of an MPI launcher and under one that offers PMI-1. `requested` ("mpi", "nccl", "native", or "" for
/// none) takes precedence.
///
/// Pure. Throws UnavailableError if the requested backend, or the one that the launcher needs, cannot be used; the text
/// lists what was looked for and the cure. Throws InvalidArgumentError for an unknown name.
Choice choose(const Facts& facts, const std::string& requested);

/// The facts of the loaded MPI library that are compared with the launcher.
struct World {
  int size = 1;
  std::string library;  ///< path and version of the MPI library
};

/// Throws UnavailableError, naming launcher, both sizes, library and cure, if the launcher has started n > 1 ranks but
/// the world has another size: the launcher and the library belong to different MPIs.
void check_launch(const Facts& facts, const World& world);

}  // namespace samestep
