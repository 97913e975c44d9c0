#pragma once

#include <atomic>
#include <memory>

#include "collectives/pairwise_exchange.h"
#include "communicator/communicator.h"
#include "engine/point_to_point.h"
#include "engine/progress_engine.h"

namespace samestep {

/// Every operation over any Transport. Algorithms and order of summation are the package's own, so all transports give
/// the same bits.
///
/// Cost for p ranks and N bytes: short data take one round of p - 1 messages per rank. Long data take that round, and
/// each rank sends 2 N (p - 1) / p bytes for allreduce, N (p - 1) / p for reduce_scatter, N (p - 1) for allgather.
class ExchangeCommunicator : public Communicator {
 public:
  ExchangeCommunicator(std::unique_ptr<Transport> transport, ExchangeOptions options);
  /// Without `close`, keeps whatever the transport may still access.
  ~ExchangeCommunicator() override { engine_->retain_forever(); }

  std::shared_ptr<Communicator> split(int color, int key, const Deadline& deadline, const std::string& called) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const Deadline& deadline,
                                      const std::string& called) override;
  Membership& membership() override { return *engine_; }
  void close(const Deadline& deadline) override;
  bool usable() const override;
  void abandon(std::exception_ptr error, const std::string& reason) override { engine_->abandon(error, reason); }
  Counters counters() const override;

  // Messages whose memory is available a segment at a time. Peers need not know: they send and receive whole messages,
  // or theirs in segments too. The segments of a body are sent, and received, in their order.

  /// The length of the segments of a message: all about as long, and too long to travel before they are received.
  std::size_t segment_nbytes(std::size_t nbytes) const { return engine_->segment_nbytes(nbytes); }
  /// Elements that come with a header have at most so many bytes.
  std::size_t max_inline_message() const { return engine_->transport().eager_limit(); }
  /// Sends the header and the first segment, which lies at `args.in.data`. Sets `body` at once.
  WorkPtr send_first(const SendArgs& args, std::shared_ptr<MessageBody> body) {
    return start_operation<Send>(args, std::move(body));
  }
  /// Receives the header, and the elements that come with it, into `args.out`, of which `max_inline_message` bytes are
  /// in memory. Sets `body` before the Work ends.
  WorkPtr receive_header(const RecvArgs& args, std::shared_ptr<MessageBody> body) {
    return start_operation<Receive>(args, std::move(body));
  }
  /// The segment at `offset`. Done once its memory may be reused.
  WorkPtr send_segment(const MessageBody& body, std::size_t offset, const void* data) {
    return start_operation<BodySegment>(body, offset, data, nullptr);
  }
  WorkPtr receive_segment(const MessageBody& body, std::size_t offset, void* data) {
    return start_operation<BodySegment>(body, offset, nullptr, data);
  }

  /// The shared state of the group, for transports that add to it.
  const std::shared_ptr<ProgressEngine>& engine_of_group() const { return engine_; }

 protected:
  explicit ExchangeCommunicator(std::shared_ptr<ProgressEngine> engine)
      : ExchangeCommunicator(engine, engine->transport().name()) {}
  ExchangeCommunicator(std::shared_ptr<ProgressEngine> engine, std::string_view transport);

  WorkPtr start_collective(const CollectiveArgs& args) override;
  /// Starts a reduction. `args.out.count` is that of the result also on ranks that get none.
  virtual WorkPtr start_reduction(const CollectiveArgs& args);
  WorkPtr start_send(const SendArgs& args) override { return start_operation<Send>(args); }
  WorkPtr start_recv(const RecvArgs& args) override;
  void apply(const GroupSettings& settings) override { engine_->apply(settings); }
  /// Starts a collective that only moves data.
  virtual WorkPtr start_exchange(const Signature& signature, std::vector<PeerTransfer> transfers) {
    return start_operation<PairwiseExchange>(signature, std::move(transfers));
  }
  /// Starts a broadcast of more bytes than travel with the headers.
  virtual WorkPtr start_long_bcast(const CollectiveArgs& args);
  /// Makes the group of `ranks`. Collective over them.
  virtual std::shared_ptr<Communicator> make_child(std::span<const int> ranks, ExchangeOptions options,
                                                   const Deadline& deadline);

  /// Plans a collective that only moves data as one transfer for each pair of ranks, and starts it.
  WorkPtr start_transfers(const CollectiveArgs& args);
  /// Bytes that each rank sends to another in a reduction.
  static std::size_t nbytes_to_peer(const CollectiveArgs& args) {
    return args.type == CollectiveType::reduce_scatter ? args.out.nbytes() : args.in.nbytes();
  }
  ProgressEngine& shared_engine() { return *engine_; }
  template <class Op, class... Args>
  WorkPtr start_operation(Args&&... args) {
    auto operation = make_operation<Op>(std::forward<Args>(args)...);
    engine_->start(operation);
    return operation;
  }
  template <class Op, class... Args>
  std::shared_ptr<Op> make_operation(Args&&... args) {
    return std::make_shared<Op>(engine_, std::forward<Args>(args)...);
  }

 private:
  std::vector<PeerTransfer> no_transfers() const { return std::vector<PeerTransfer>(static_cast<std::size_t>(size())); }
  /// Waits for a collective on buffers of the caller. Leaves the group if the deadline passes, because peers may still
  /// write to them.
  void meet_or_abandon(Work& work, const Deadline& deadline);
  std::shared_ptr<Communicator> make_child(std::span<const int> ranks, const std::string& called, std::uint32_t number,
                                           const Deadline& deadline);
  /// Tells the members of a new group whether this rank has made it. Throws on all of them if one has `failed`.
  void confirm_child(std::span<const int> ranks, const std::string& called, const std::exception_ptr& failed,
                     const Deadline& deadline);
  std::uint32_t reserve_group_id() const;

  std::shared_ptr<ProgressEngine> engine_;
  std::atomic<int> children_ = 0;  // relaxed: a number for names
};

}  // namespace samestep
