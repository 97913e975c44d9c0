#include "communicator/checks.h"
#include "nccl/device_communicator.h"
#include "nccl/device_detail.h"

namespace samestep {

using namespace device_detail;

Communicator::WorkPtr DeviceCommunicator::message_by_address(const ConstBuffer& buffer, bool sends,
                                                             std::function<WorkPtr()> start) {
  StagedPart part;
  part.in = sends ? static_cast<const std::byte*>(buffer.data) : nullptr;
  part.by_address = true;
  part.start = [start = std::move(start)](std::byte*, std::byte*) { return start(); };
  // A receive writes when MPI pleases, so it too begins after what its memory is still used for.
  StagedCall call;
  call.after = {buffer.stream};
  call.message = true;
  call.parts.push_back(std::move(part));
  return stager_->start(std::move(call));
}

Communicator::WorkPtr DeviceCommunicator::send(ConstBuffer in, int dest, int tag) {
  if (on_host(in)) return host_->send(in, dest, tag);
  check_here("send", in);
  checks::peer_in_group("send", "dest", dest, size());
  checks::tag_is_valid("send", tag);
  if (by_address(in.nbytes())) {
    const ConstBuffer as_it_lies{in.data, in.count, in.dtype};
    return message_by_address(in, /*sends=*/true,
                              [host = host_, as_it_lies, dest, tag] { return host->send(as_it_lies, dest, tag); });
  }
  return staged_whole(
      in, Buffer{nullptr, 0, in.dtype},
      [host = host_, dest, tag](ConstBuffer from, Buffer) { return host->send(from, dest, tag); }, /*message=*/true);
}

Communicator::WorkPtr DeviceCommunicator::recv(Buffer out, int source, int tag) {
  if (on_host(out)) return host_->recv(out, source, tag);
  check_here("recv", out);
  if (source != kAnySource) checks::peer_in_group("recv", "source", source, size());
  if (tag != kAnyTag) checks::tag_is_valid("recv", tag);
  if (by_address(out.nbytes())) {
    const Buffer as_it_lies{out.data, out.count, out.dtype};
    return message_by_address(out, /*sends=*/false,
                              [host = host_, as_it_lies, source, tag] { return host->recv(as_it_lies, source, tag); });
  }
  return staged_whole(
      ConstBuffer{nullptr, 0, out.dtype}, out,
      [host = host_, source, tag](ConstBuffer, Buffer to) { return host->recv(to, source, tag); }, /*message=*/true);
}

Communicator::WorkPtr DeviceCommunicator::send_now(const ConstBuffer& in, int dest, int tag) {
  return on_host(in) ? host_->send_now(in, dest, tag) : send(in, dest, tag);
}

Communicator::WorkPtr DeviceCommunicator::recv_now(const Buffer& out, int source, int tag, Status& status) {
  return on_host(out) ? host_->recv_now(out, source, tag, status) : recv(out, source, tag);
}

}  // namespace samestep
