#pragma once

#include <cstdint>

// The binary interfaces of MPI as far as they differ: what a handle is, and how a status is laid out.
// Handles of Open MPI are addresses, of MPICH ints, of the standard ABI small numbers as addresses.

namespace samestep::mpi_abi {

struct OpenMpi {
  using Handle = void*;
  struct Status {
    int source, tag, error, cancelled;
    std::uint64_t nbytes;
  };
};

struct Mpich {
  using Handle = int;
  struct Status {
    int count_low, count_high_and_cancelled;
    int source, tag, error;
  };
};

struct Standard {
  using Handle = void*;
  struct Status {
    int source, tag, error;
    int internal[5];
  };
};

static_assert(sizeof(OpenMpi::Status) == 24 && sizeof(Mpich::Status) == 20 && sizeof(Standard::Status) == 32);

}  // namespace samestep::mpi_abi
