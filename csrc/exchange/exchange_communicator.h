#pragma once

#include <memory>

#include "communicator/communicator.h"
#include "exchange/engine.h"
#include "exchange/movement.h"

namespace samestep {

class SharedHeap;

/// Every verb over any transport that moves tagged messages (Messenger). Algorithms and numerics are the
/// package's own, so two transports give the same bits.
///
/// Cost, p ranks, N bytes: one round of p - 1 messages for short data; for long data that round and
/// 2 N (p - 1) / p bytes sent per rank for allreduce, N (p - 1) / p for reduce_scatter, N (p - 1) for
/// allgather.
class ExchangeCommunicator : public Communicator {
 public:
  ExchangeCommunicator(std::unique_ptr<Messenger> messenger, ExchangeOptions options);
  /// Dropped without close: nothing is freed that the transport may still use.
  ~ExchangeCommunicator() override { engine_->keep_for_good(); }

  int rank() const override { return engine_->rank(); }
  int size() const override { return engine_->size(); }
  const std::string& name() const override { return engine_->name(); }
  std::string_view engine() const override { return engine_->messenger().engine(); }

  WorkPtr all_reduce(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) override;
  WorkPtr reduce(ConstBuffer in, Buffer out, const Reduction& reduction, int root, const Shape& shape) override;
  WorkPtr broadcast(Buffer buffer, int root, const Shape& shape) override;
  WorkPtr all_gather(ConstBuffer in, Buffer out, const Shape& shape) override;
  WorkPtr all_gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts) override;
  WorkPtr gather(ConstBuffer in, Buffer out, int root, const Shape& shape) override;
  WorkPtr gather_v(ConstBuffer in, Buffer out, std::span<const std::uint64_t> counts, int root) override;
  WorkPtr scatter(ConstBuffer in, Buffer out, int root, const Shape& shape) override;
  WorkPtr scatter_v(ConstBuffer in, std::span<const std::uint64_t> counts, Buffer out, int root) override;
  WorkPtr reduce_scatter(ConstBuffer in, Buffer out, const Reduction& reduction, const Shape& shape) override;
  WorkPtr all_to_all(ConstBuffer in, Buffer out, const Shape& shape) override;
  WorkPtr all_to_all_v(ConstBuffer in, std::span<const std::uint64_t> send_counts, Buffer out,
                       std::span<const std::uint64_t> receive_counts) override;
  WorkPtr barrier() override;
  WorkPtr send(ConstBuffer in, int dest, int tag) override { return start_send(in, dest, tag, false); }
  WorkPtr recv(Buffer out, int source, int tag) override { return start_recv(out, source, tag, false); }
  bool cancel(Work& recv) override;
  std::shared_ptr<Communicator> split(int color, int key, const Deadline& deadline) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline& deadline) override;
  void progress() override { engine_->progress(); }
  void look_for_losses() override { engine_->look_for_farewells(); }
  void close(const Deadline& deadline) override;
  bool usable() const override;
  void abandon(std::exception_ptr error, const std::string& reason) override {
    engine_->abandon(std::move(error), reason);
  }
  void set_hosts(std::vector<std::string> hosts) override { engine_->set_hosts(std::move(hosts)); }
  void set_terms(const std::string& way, std::size_t window_piece, std::size_t max_message) override {
    engine_->set_terms(way_called(way), window_piece, max_message);
  }
  void prefer_pieces(std::size_t nbytes) override { engine_->prefer_pieces(nbytes); }
  void set_oversubscribed(bool oversubscribed) override { engine_->set_oversubscribed(oversubscribed); }
  bool oversubscribed() const override { return engine_->options().oversubscribed; }
  Counters counters() const override;

  /// Collectives that only move data hand runs of more bytes to the messenger as they lie, whatever memory that is;
  /// shorter ones are read and written here.
  std::size_t most_with_header() const { return Movement::short_nbytes(*engine_, Verb::broadcast); }

  /// What the operations of this group share, for one that adds to it.
  const std::shared_ptr<Engine>& engine_of_group() const { return engine_; }
  /// Where `allocate_shared` gets its memory from. Null where there is none.
  virtual std::shared_ptr<SharedHeap> heap() const { return nullptr; }

 protected:
  ExchangeCommunicator(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  /// A reduction of any kind, of `nbytes` that go from one rank to another.
  virtual WorkPtr reduction(const Signature& signature, ConstBuffer in, Buffer out, const Reduction& reduction,
                            std::size_t nbytes);
  /// `waited_for`: by the caller, at once.
  WorkPtr start_send(ConstBuffer in, int dest, int tag, bool waited_for);
  WorkPtr start_recv(Buffer out, int source, int tag, bool waited_for);
  /// A collective that only moves data.
  virtual WorkPtr movement(const Signature& signature, std::vector<Movement::Route> routes) {
    return start<Movement>(signature, std::move(routes));
  }
  /// A broadcast of more bytes than go with the headers.
  virtual WorkPtr long_broadcast(const Signature& signature, Buffer buffer);
  /// The group of `ranks`, which all are about to make it.
  virtual std::shared_ptr<Communicator> make_child(std::span<const int> ranks, ExchangeOptions options,
                                                   const Deadline& deadline);

  /// The broadcast as one message from root to each rank.
  WorkPtr send_to_all(const Signature& signature, Buffer buffer);
  Engine& shared_engine() { return *engine_; }
  template <class Op, class... Args>
  WorkPtr start(Args&&... args) {
    auto operation = start_later<Op>(std::forward<Args>(args)...);
    engine_->start(operation);
    return operation;
  }
  template <class Op, class... Args>
  std::shared_ptr<Op> start_later(Args&&... args) {
    return std::make_shared<Op>(engine_, std::forward<Args>(args)...);
  }

 private:
  std::vector<Movement::Route> routes() const;
  /// Waits for a collective whose memory is the caller's: a deadline that passes ends the group.
  void meet_or_abandon(Work& work, const Deadline& deadline);
  std::shared_ptr<Communicator> make_child(std::span<const int> ranks, const std::string& suffix, std::uint32_t number,
                                           const Deadline& deadline);
  std::uint32_t next_group() const;

  std::shared_ptr<Engine> engine_;
  int children_ = 0;
};

}  // namespace samestep
