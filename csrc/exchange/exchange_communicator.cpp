#include "exchange/exchange_communicator.h"

#include <algorithm>
#include <mutex>

#include "communicator/checks.h"
#include "core/error.h"
#include "core/format.h"
#include "exchange/group_call.h"
#include "exchange/halving.h"
#include "exchange/point_to_point.h"
#include "exchange/short_reduction.h"
#include "exchange/windows.h"

namespace samestep {
namespace {

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

}  // namespace

ExchangeCommunicator::ExchangeCommunicator(std::unique_ptr<Messenger> messenger, ExchangeOptions options)
    : engine_(std::make_shared<Engine>(std::move(messenger), std::move(options))) {}

std::vector<Movement::Route> ExchangeCommunicator::routes() const {
  return std::vector<Movement::Route>(static_cast<std::size_t>(size()));
}

Communicator::WorkPtr ExchangeCommunicator::reduction(const Signature& signature, ConstBuffer in, Buffer out,
                                                      const Reduction& reduction, std::size_t nbytes) {
  if (ShortReduction::fits(*engine_, signature.verb, nbytes)) {
    return start<ShortReduction>(signature, in, out, reduction);
  }
  const Way way = engine_->options().way.value_or(cheapest_way(size(), nbytes));
  const bool halves = way == Way::halving;
  const bool can = signature.verb == Verb::all_reduce && size() > 1 && HalvingRun::carries(in.dtype, reduction.op);
  if (!can || way == Way::direct) return start<Windows>(signature, in, out, reduction);
  return start<Halving>(signature, in, out, reduction, halves);
}

Communicator::WorkPtr ExchangeCommunicator::all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                       const Shape& shape) {
  const Call call{Verb::all_reduce, in, out, reduction, -1, shape};
  checks::arguments(call, rank(), size());
  return this->reduction(call.signature(), in, out, reduction, in.nbytes());
}

Communicator::WorkPtr ExchangeCommunicator::reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root,
                                                   const Shape& shape) {
  const Call call{Verb::reduce, in, out, reduction, root, shape};
  checks::arguments(call, rank(), size());
  if (rank() != root) out = {nullptr, in.count, in.dtype};
  return this->reduction(call.signature(), in, out, reduction, in.nbytes());
}

Communicator::WorkPtr ExchangeCommunicator::broadcast(Buffer buffer, int root, const Shape& shape) {
  const Call call{Verb::broadcast, {}, buffer, {}, root, shape};
  checks::arguments(call, rank(), size());
  if (buffer.nbytes() > Movement::short_nbytes(*engine_, Verb::broadcast))
    return long_broadcast(call.signature(), buffer);
  return send_to_all(call.signature(), buffer);
}

Communicator::WorkPtr ExchangeCommunicator::long_broadcast(const Signature& signature, Buffer buffer) {
  return start<Windows>(signature, buffer, buffer, Reduction{});
}

Communicator::WorkPtr ExchangeCommunicator::send_to_all(const Signature& signature, Buffer buffer) {
  const int root = signature.root;
  std::vector<Movement::Route> routes = this->routes();
  for (Movement::Route& route : routes) {
    if (rank() == root) route = {bytes(buffer.data), buffer.nbytes(), nullptr, 0};
  }
  Movement::Route& from_root = routes[static_cast<std::size_t>(root)];
  from_root = {bytes(buffer.data), rank() == root ? buffer.nbytes() : 0, bytes(buffer.data), buffer.nbytes()};
  return movement(signature, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::all_gather(ConstBuffer in, Buffer out, const Shape& shape) {
  const Call call{Verb::all_gather, in, out, {}, -1, shape};
  checks::arguments(call, rank(), size());
  std::vector<Movement::Route> routes = this->routes();
  for (std::size_t i = 0; i < routes.size(); ++i) {
    routes[i] = {bytes(in.data), in.nbytes(), bytes(out.data) + i * in.nbytes(), in.nbytes()};
  }
  return movement(call.signature(), std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::all_gather_v(ConstBuffer in, Buffer out,
                                                         std::span<const std::uint64_t> counts) {
  checks::on_host("allgatherv", in);
  checks::on_host("allgatherv", out);
  checks::same_dtype("allgatherv", in, out);
  checks::counts_fill("allgatherv", "counts", counts, size(), out);
  checks::has_count("allgatherv", "the input", in, counts[static_cast<std::size_t>(rank())]);
  std::vector<Movement::Route> routes = this->routes();
  std::size_t at = 0;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    const std::size_t nbytes = counts[i] * itemsize(in.dtype);
    routes[i] = {bytes(in.data), in.nbytes(), bytes(out.data) + at, nbytes};
    at += nbytes;
  }
  return movement(Signature{Verb::all_gather_v, in.dtype, ReduceOp::sum, -1, {}}, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::gather(ConstBuffer in, Buffer out, int root, const Shape& shape) {
  checks::on_host("gather", in);
  checks::root_in_group("gather", root, size());
  std::vector<Movement::Route> routes = this->routes();
  routes[static_cast<std::size_t>(root)] = {bytes(in.data), in.nbytes(), nullptr, 0};
  if (rank() == root) {
    checks::on_host("gather", out);
    checks::same_dtype("gather", in, out);
    checks::has_count("gather", "out", out, in.count * static_cast<std::uint64_t>(size()));
    for (std::size_t i = 0; i < routes.size(); ++i) {
      routes[i].in = bytes(out.data) + i * in.nbytes();
      routes[i].in_nbytes = in.nbytes();
    }
  }
  return movement(Signature{Verb::gather, in.dtype, ReduceOp::sum, root, shape}, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts,
                                                     int root) {
  checks::on_host("gatherv", in);
  checks::root_in_group("gatherv", root, size());
  std::vector<Movement::Route> routes = this->routes();
  routes[static_cast<std::size_t>(root)] = {bytes(in.data), in.nbytes(), nullptr, 0};
  if (rank() == root) {
    checks::on_host("gatherv", out);
    checks::same_dtype("gatherv", in, out);
    checks::counts_fill("gatherv", "counts", counts, size(), out);
    std::size_t at = 0;
    for (std::size_t i = 0; i < routes.size(); ++i) {
      routes[i].in = bytes(out.data) + at;
      routes[i].in_nbytes = counts[i] * itemsize(in.dtype);
      at += routes[i].in_nbytes;
    }
  }
  return movement(Signature{Verb::gather_v, in.dtype, ReduceOp::sum, root, {}}, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::scatter(ConstBuffer in, Buffer out, int root, const Shape& shape) {
  checks::on_host("scatter", out);
  checks::root_in_group("scatter", root, size());
  std::vector<Movement::Route> routes = this->routes();
  if (rank() == root) {
    checks::on_host("scatter", in);
    checks::same_dtype("scatter", in, out);
    checks::has_count("scatter", "the input", in, out.count * static_cast<std::uint64_t>(size()));
    for (std::size_t i = 0; i < routes.size(); ++i) {
      routes[i] = {bytes(in.data) + i * out.nbytes(), out.nbytes(), nullptr, 0};
    }
  }
  routes[static_cast<std::size_t>(root)].in = bytes(out.data);
  routes[static_cast<std::size_t>(root)].in_nbytes = out.nbytes();
  return movement(Signature{Verb::scatter, out.dtype, ReduceOp::sum, root, shape}, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::scatter_v(ConstBuffer in, std::span<const std::uint64_t> counts, Buffer out,
                                                      int root) {
  checks::on_host("scatterv", out);
  checks::root_in_group("scatterv", root, size());
  std::vector<Movement::Route> routes = this->routes();
  if (rank() == root) {
    checks::on_host("scatterv", in);
    checks::same_dtype("scatterv", in, out);
    checks::counts_fill("scatterv", "counts", counts, size(), in);
    checks::has_count("scatterv", "out", out, counts[static_cast<std::size_t>(root)]);
    std::size_t at = 0;
    for (std::size_t i = 0; i < routes.size(); ++i) {
      routes[i] = {bytes(in.data) + at, counts[i] * itemsize(in.dtype), nullptr, 0};
      at += routes[i].out_nbytes;
    }
  }
  routes[static_cast<std::size_t>(root)].in = bytes(out.data);
  routes[static_cast<std::size_t>(root)].in_nbytes = out.nbytes();
  return movement(Signature{Verb::scatter_v, out.dtype, ReduceOp::sum, root, {}}, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction,
                                                           const Shape& shape) {
  const Call call{Verb::reduce_scatter, in, out, reduction, -1, shape};
  checks::arguments(call, rank(), size());
  return this->reduction(call.signature(), in, out, reduction, out.nbytes());
}

Communicator::WorkPtr ExchangeCommunicator::all_to_all(ConstBuffer in, Buffer out, const Shape& shape) {
  const Call call{Verb::all_to_all, in, out, {}, -1, shape};
  checks::arguments(call, rank(), size());
  const std::size_t block = in.nbytes() / static_cast<std::size_t>(size());
  std::vector<Movement::Route> routes = this->routes();
  for (std::size_t i = 0; i < routes.size(); ++i) {
    routes[i] = {bytes(in.data) + i * block, block, bytes(out.data) + i * block, block};
  }
  return movement(call.signature(), std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::all_to_all_v(ConstBuffer in, std::span<const std::uint64_t> send_counts,
                                                         Buffer out, std::span<const std::uint64_t> receive_counts) {
  checks::on_host("alltoallv", in);
  checks::on_host("alltoallv", out);
  checks::same_dtype("alltoallv", in, out);
  checks::counts_fill("alltoallv", "send counts", send_counts, size(), in);
  checks::counts_fill("alltoallv", "receive counts", receive_counts, size(), out);
  std::vector<Movement::Route> routes = this->routes();
  std::size_t sent = 0, received = 0;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    routes[i] = {bytes(in.data) + sent, send_counts[i] * itemsize(in.dtype), bytes(out.data) + received,
                 receive_counts[i] * itemsize(in.dtype)};
    sent += routes[i].out_nbytes;
    received += routes[i].in_nbytes;
  }
  return movement(Signature{Verb::all_to_all_v, in.dtype, ReduceOp::sum, -1, {}}, std::move(routes));
}

Communicator::WorkPtr ExchangeCommunicator::barrier() { return movement(Signature{}, routes()); }

Communicator::WorkPtr ExchangeCommunicator::start_send(ConstBuffer in, int dest, int tag, bool waited_for) {
  checks::on_host("send", in);
  checks::peer_in_group("send", "dest", dest, size());
  checks::tag_is_valid("send", tag);
  return start<Send>(in, dest, tag, waited_for);
}

Communicator::WorkPtr ExchangeCommunicator::start_recv(Buffer out, int source, int tag, bool waited_for) {
  checks::on_host("recv", out);
  if (source != kAnySource) checks::peer_in_group("recv", "source", source, size());
  if (tag != kAnyTag) checks::tag_is_valid("recv", tag);
  return start<Receive>(out, source, tag, waited_for);
}

bool ExchangeCommunicator::cancel(Work& recv) {
  const std::lock_guard lock(engine_->mutex());
  auto* receive = dynamic_cast<Receive*>(&recv);
  return receive != nullptr && receive->cancel();
}

std::shared_ptr<Communicator> ExchangeCommunicator::make_child(std::span<const int> ranks, const std::string& suffix,
                                                               std::uint32_t number, const Deadline& deadline) {
  ExchangeOptions options = engine_->options();
  options.name = str(name(), "/", suffix);
  options.number = number;
  if (!options.hosts.empty()) {
    options.hosts.clear();
    for (const int rank : ranks) options.hosts.push_back(engine_->options().hosts[static_cast<std::size_t>(rank)]);
  }
  const std::lock_guard lock(engine_->mutex());
  return make_child(ranks, std::move(options), deadline);
}

std::shared_ptr<Communicator> ExchangeCommunicator::make_child(std::span<const int> ranks, ExchangeOptions options,
                                                               const Deadline&) {
  return std::make_shared<ExchangeCommunicator>(engine_->messenger().subset_with(ranks, options.number), options);
}

std::uint32_t ExchangeCommunicator::next_group() const {
  const std::lock_guard lock(engine_->mutex());
  return engine_->messenger().next_group();
}

void ExchangeCommunicator::meet_or_abandon(Work& work, const Deadline& deadline) {
  try {
    work.wait(deadline);
  } catch (const TimeoutError& error) {
    engine_->abandon(std::current_exception(), error.what());
    throw;
  }
}

std::shared_ptr<Communicator> ExchangeCommunicator::split(int color, int key, const Deadline& deadline) {
  struct Entry {
    int color, key;
    std::uint32_t number;
  };
  const Entry mine{color, key, next_group()};
  std::vector<Entry> entries(static_cast<std::size_t>(size()));
  std::vector<Movement::Route> routes = this->routes();
  for (std::size_t i = 0; i < routes.size(); ++i) {
    routes[i] = {bytes(&mine), sizeof mine, reinterpret_cast<std::byte*>(&entries[i]), sizeof mine};
  }
  meet_or_abandon(*start<Movement>(Signature{Verb::make_group, DType::uint8, ReduceOp::sum, -1, {}}, std::move(routes)),
                  deadline);
  const int number = children_++;
  if (color < 0) return nullptr;
  std::vector<int> members;
  std::uint32_t group_number = 0;
  for (int rank = 0; rank < size(); ++rank) {
    const Entry& entry = entries[static_cast<std::size_t>(rank)];
    if (entry.color != color) continue;
    members.push_back(rank);
    group_number = std::max(group_number, entry.number);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return entries[static_cast<std::size_t>(a)].key < entries[static_cast<std::size_t>(b)].key;
  });
  return make_child(members, str("split ", number, " color ", color), group_number, deadline);
}

std::shared_ptr<Communicator> ExchangeCommunicator::group(std::span<const int> ranks, const Deadline& deadline) {
  std::string list;
  std::vector<bool> seen(static_cast<std::size_t>(size()));
  for (const int rank : ranks) {
    checks::peer_in_group("group", "rank", rank, size());
    if (seen[static_cast<std::size_t>(rank)]) throw InvalidArgumentError(str("group: rank ", rank, " is listed twice"));
    seen[static_cast<std::size_t>(rank)] = true;
    list += str(list.empty() ? "" : ",", rank);
  }
  if (!seen[static_cast<std::size_t>(rank())]) {
    throw InvalidArgumentError(str("group: called by rank ", rank(), ", which is not among its ranks ", list));
  }
  engine_->require_usable();
  const auto call = start_later<GroupCall>(std::vector<int>(ranks.begin(), ranks.end()));
  engine_->start(call);
  call->wait(deadline);
  return make_child(ranks, str("group ", list), call->number(), deadline);
}

void ExchangeCommunicator::close(const Deadline& deadline) {
  if (engine_->usable()) {
    meet_or_abandon(*start<Movement>(Signature{Verb::close, DType::uint8, ReduceOp::sum, -1, {}}, routes()), deadline);
  }
  engine_->close();
}

bool ExchangeCommunicator::usable() const {
  const std::lock_guard lock(engine_->mutex());
  return engine_->usable();
}

Communicator::Counters ExchangeCommunicator::counters() const {
  const std::lock_guard lock(engine_->mutex());
  return {engine_->operations_started(), engine_->messages(), engine_->bytes()};
}

}  // namespace samestep
