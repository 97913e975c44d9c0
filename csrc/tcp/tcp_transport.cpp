#include "tcp/tcp_transport.h"

#include <numeric>

#include "collectives/exchange_communicator.h"
#include "tcp/mesh.h"
#include "transport/group_numbers.h"
#include "transport/tags.h"

namespace samestep {
namespace {

constexpr std::size_t kShortMessage = 16 << 10;

class TcpTransport final : public Transport {
 public:
  TcpTransport(std::shared_ptr<tcp::Mesh> mesh, tcp::Mesh::Group group, std::vector<int> members)
      : mesh_(std::move(mesh)),
        group_(group),
        numbers_(group),
        members_(std::move(members)),
        rank_of_(world_size(), -1) {
    for (std::size_t i = 0; i < members_.size(); ++i)
      rank_of_[static_cast<std::size_t>(members_[i])] = static_cast<int>(i);
    rank_ = rank_of_[static_cast<std::size_t>(mesh_->rank())];
    reported_.resize(members_.size());
    mesh_->open(group_, members_);
  }
  ~TcpTransport() override { mesh_->drop(group_); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string_view name() const override { return "tcp"; }
  std::size_t max_message() const override { return SIZE_MAX; }
  std::size_t eager_limit() const override { return kShortMessage; }

  Request send(const void* data, std::size_t nbytes, int dest, int tag) override {
    const Request sent = request(mesh_->send(group_, {static_cast<const std::byte*>(data), nbytes}, member(dest), tag));
    if (tag == tags::kLeaveNotice)
      mesh_->flush(
          member(dest));  // a rank that sends a leave notice may exit at once, and would then be reported as the cause
    return sent;
  }

  Request receive(void* data, std::size_t capacity, int source, int tag) override {
    return request(mesh_->receive(group_, data, capacity, source == kAnySource ? source : member(source), tag));
  }

  bool test(Request& request, Envelope* envelope) override {
    if (!request.active) return true;
    Envelope met;
    if (!mesh_->test(group_, reinterpret_cast<tcp::RequestState*>(request.bits), met)) return false;
    request.active = false;
    if (envelope != nullptr) *envelope = in_group(met);
    return true;
  }

  bool cancel(Request& request) override {
    if (!request.active || !mesh_->cancel(group_, reinterpret_cast<tcp::RequestState*>(request.bits))) return false;
    request.active = false;
    return true;
  }

  void detach_sends() override { mesh_->detach_sends(group_); }

  bool probe(int tag, Envelope& envelope) override {
    Envelope from;
    if (!mesh_->probe(group_, tag, from)) return false;
    envelope = in_group(from);
    return true;
  }

  std::unique_ptr<Transport> subset(std::span<const int> ranks, std::uint32_t) override {
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(member(rank));
    const tcp::Mesh::Group group = numbers_.next(members);
    return std::make_unique<TcpTransport>(mesh_, group, std::move(members));
  }

  bool wait_for_activity() override {
    mesh_->wait_for_activity();
    return true;
  }

  std::vector<PeerFailure> failed_peers() override {
    std::vector<PeerFailure> found;
    for (int peer = 0; peer < size(); ++peer) {
      const auto i = static_cast<std::size_t>(peer);
      if (reported_[i] || peer == rank_) continue;
      if (const std::string why = mesh_->failure(group_, members_[i]); !why.empty()) {
        reported_[i] = true;
        // Operation 0: what the peer has completed is unknown, so all operations that are still pending and need it
        // fail.
        found.push_back({peer, 0, why});
      }
    }
    return found;
  }

  bool has_closed(int peer) override { return mesh_->has_closed(group_, member(peer)); }
  void close() override { mesh_->close(group_, tcp::Mesh::Peers::close_too); }
  void close_last() override { mesh_->close(group_, tcp::Mesh::Peers::have_left); }
  bool forgets_at_close() const override { return true; }

 private:
  static Request request(tcp::RequestState* record) { return {reinterpret_cast<std::uintptr_t>(record), true}; }
  std::size_t world_size() const { return static_cast<std::size_t>(mesh_->size()); }
  int member(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  // The mesh knows ranks of the world only, since all groups share its connections.
  Envelope in_group(const Envelope& met) const {
    return {met.source < 0 ? -1 : rank_of_[static_cast<std::size_t>(met.source)], met.tag};
  }

  std::shared_ptr<tcp::Mesh> mesh_;
  tcp::Mesh::Group group_;
  GroupNumbers numbers_;      // of the groups made from this one
  std::vector<int> members_;  // by rank of the group, ranks of the world
  std::vector<int> rank_of_;  // by rank of the world
  int rank_ = -1;
  std::vector<bool> reported_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<TcpPeer> peers) {
  std::vector<int> members(peers.size());
  std::iota(members.begin(), members.end(), 0);
  return std::make_unique<TcpTransport>(std::make_shared<tcp::Mesh>(rank, std::move(peers)), GroupNumbers::kWorld,
                                        std::move(members));
}

std::shared_ptr<Communicator> open_tcp_world(int rank, std::vector<TcpPeer> peers, const ExchangeOptions& options) {
  return std::make_shared<ExchangeCommunicator>(make_tcp_transport(rank, std::move(peers)), options);
}

}  // namespace samestep
