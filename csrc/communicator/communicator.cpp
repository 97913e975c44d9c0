#include "communicator/communicator.h"

namespace samestep {

Communicator::WorkPtr Communicator::start(const CollectiveArgs& args) {
  checks::arguments(args, rank(), size(), info_.needs_host_memory);
  return start_collective(args);
}

Communicator::WorkPtr Communicator::run(const CollectiveArgs& args) {
  checks::arguments(args, rank(), size(), info_.needs_host_memory);
  return run_collective(args);
}

bool Communicator::run_in_stream(const CollectiveArgs& args, WorkPtr& launching) {
  checks::arguments(args, rank(), size(), info_.needs_host_memory);
  return run_collective_in_stream(args, launching);
}

Communicator::WorkPtr Communicator::start(const SendArgs& args) {
  checks::arguments(args, size(), info_.needs_host_memory);
  return start_send(args);
}

Communicator::WorkPtr Communicator::start(const RecvArgs& args) {
  checks::arguments(args, size(), info_.needs_host_memory);
  return start_recv(args);
}

Communicator::WorkPtr Communicator::run(const SendArgs& args) {
  checks::arguments(args, size(), info_.needs_host_memory);
  return run_send(args);
}

Communicator::WorkPtr Communicator::run(const RecvArgs& args, Status& status) {
  checks::arguments(args, size(), info_.needs_host_memory);
  return run_recv(args, status);
}

Communicator::WorkPtr Communicator::run(const SendArgs& sent, const RecvArgs& received, Status& status,
                                        WorkPtr& sending) {
  checks::arguments(sent, size(), info_.needs_host_memory);
  checks::arguments(received, size(), info_.needs_host_memory);
  return run_sendrecv(sent, received, status, sending);
}

// Defaults for transports without a fast path: nothing completes at once, and `status` comes from the Work.
Communicator::WorkPtr Communicator::run_recv(const RecvArgs& args, Status& status) {
  (void)status;
  return start_recv(args);
}

Communicator::WorkPtr Communicator::run_sendrecv(const SendArgs& sent, const RecvArgs& received, Status& status,
                                                 WorkPtr& sending) {
  // The send first: were the receive to throw, `sending` tells the caller which buffer is still in use.
  sending = run_send(sent);
  return run_recv(received, status);
}

Membership& Communicator::membership() {
  // Shared by all groups that do not override this: without peers nobody can leave.
  static Membership of_one_rank;  // without state
  return of_one_rank;
}

void Communicator::configure(const GroupSettings& settings) {
  // relaxed: see oversubscribed()
  if (settings.oversubscribed) oversubscribed_.store(*settings.oversubscribed, std::memory_order_relaxed);
  apply(settings);
}

}  // namespace samestep
