/* What one small all-reduce costs in C by three methods, which alternate in one run: MPI_Allreduce, MPI_Iallreduce with
 * MPI_Test, and an exchange of messages that carry a 16-byte header between all ranks, through posted receives.
 *
 *   mpicc -O2 benchmarks/mpi_exchange.c -o build/mpi_exchange && mpirun -n 2 build/mpi_exchange
 *
 * Prints microseconds per call, back to back, the median of 9 blocks. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSlots = 4, kMostRanks = 64, kHeader = 16, kMostBytes = 8192, kCalls = 4000, kBlocks = 9 };

static int rank, size;
static MPI_Comm comm;
static char arrived[kMostRanks][kSlots][kMostBytes], sent[kSlots][kMostBytes];
static MPI_Request receives[kMostRanks][kSlots], sends[kSlots][kMostRanks];
static float values[kMostBytes / 4];

static void finish(MPI_Request* request) {
  for (int flag = 0; !flag;) MPI_Test(request, &flag, MPI_STATUS_IGNORE);
}

static void exchange(int count, int call) {
  const int slot = call % kSlots;
  memcpy(sent[slot] + kHeader, values, 4 * count);
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    MPI_Isend(sent[slot], kHeader + 4 * count, MPI_BYTE, peer, 1, comm, &sends[slot][peer]);
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    finish(&receives[peer][slot]);
    const float* theirs = (const float*)(arrived[peer][slot] + kHeader);
    for (int i = 0; i < count; ++i) values[i] += theirs[i];
    MPI_Start(&receives[peer][slot]);
    finish(&sends[slot][peer]);
  }
}

static void one_call(int method, int count, int call) {
  if (method == 0) MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, comm);
  if (method == 1) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, comm, &request);
    finish(&request);
  }
  if (method == 2) exchange(count, call);
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  int provided;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  for (int peer = 0; peer < size; ++peer) {
    for (int slot = 0; slot < kSlots && peer != rank; ++slot) {
      MPI_Recv_init(arrived[peer][slot], kMostBytes, MPI_BYTE, peer, 1, comm, &receives[peer][slot]);
      MPI_Start(&receives[peer][slot]);
    }
  }
  const int counts[] = {2, 16, 256, 1000};
  if (rank == 0) printf("%d ranks, us per call\n%8s %14s %14s %14s\n", size, "bytes", "MPI_Allreduce", "MPI_Iallreduce", "exchange");
  int call = 0;
  for (unsigned c = 0; c < sizeof counts / sizeof *counts; ++c) {
    double times[3][kBlocks];
    for (int block = 0; block < kBlocks; ++block) {
      for (int turn = 0; turn < 3; ++turn) {
        const int method = (block + turn) % 3;
        memset(values, 0, sizeof values);
        MPI_Barrier(comm);
        const double begin = MPI_Wtime();
        for (int i = 0; i < kCalls; ++i) one_call(method, counts[c], method == 2 ? call++ : 0);
        double per_call = (MPI_Wtime() - begin) / kCalls * 1e6;
        MPI_Allreduce(MPI_IN_PLACE, &per_call, 1, MPI_DOUBLE, MPI_MAX, comm);
        times[method][block] = per_call;
      }
    }
    for (int method = 0; method < 3; ++method) qsort(times[method], kBlocks, sizeof(double), ascending);
    if (rank == 0) printf("%8d %14.2f %14.2f %14.2f\n", 4 * counts[c], times[0][kBlocks / 2], times[1][kBlocks / 2], times[2][kBlocks / 2]);
  }
  for (int peer = 0; peer < size; ++peer) {
    for (int slot = 0; slot < kSlots && peer != rank; ++slot) {
      MPI_Cancel(&receives[peer][slot]);
      MPI_Request_free(&receives[peer][slot]);
    }
  }
  MPI_Finalize();
  return 0;
}
