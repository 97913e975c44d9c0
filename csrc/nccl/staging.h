#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "communicator/communicator.h"
#include "core/bystanders.h"
#include "nccl/gpu_memory.h"

namespace samestep {

/// One run of elements that goes through the host: copied there, worked on, copied back.
struct StagedPart {
  const std::byte* in = nullptr;  ///< on the device; null: nothing is copied to the host
  std::size_t in_nbytes = 0;
  std::byte* out = nullptr;  ///< on the device; null: nothing is copied back
  std::size_t out_nbytes = 0;
  bool in_place = false;    ///< input and output have one place on the host
  bool by_address = false;  ///< nothing is copied: `start` hands on device memory, once its streams have come so far
  /// Starts the operation on the host.
  std::function<Communicator::WorkPtr(std::byte* in, std::byte* out)> start;
};

struct StagedCall {
  std::vector<StagedPart> parts;
  std::vector<StreamHandle> after;  ///< streams in which the buffers are produced and used
  bool message = false;             ///< a send or receive, which waits for no other operation
};

/// Operations of a host group on device memory: pinned pieces, three of one operation under way at a time, so that
/// copying out, working and copying in overlap.
///
/// Collectives begin on the host in the order they were called, so all ranks agree on it. Whoever waits for one lets
/// all advance, also whoever waits for something else (`Bystander`); there is no thread. A piece of the device's memory
/// is touched in the Stager's own streams only.
class Stager final : public Bystander, public std::enable_shared_from_this<Stager> {
 public:
  /// `messages`: the group whose sends and receives are started here. `collectives`: that of all else.
  static std::shared_ptr<Stager> make(std::shared_ptr<GpuLibrary> gpu, int device,
                                      std::shared_ptr<Communicator> messages,
                                      std::shared_ptr<Communicator> collectives);

  std::shared_ptr<Work> start(StagedCall call);
  /// A copy from device to device, after what `start` was told to wait for and before what it starts is seen to end.
  void copy_own(std::byte* to, const std::byte* from, std::size_t nbytes);
  /// Lets all advance. Never blocks.
  void progress();
  void advance() override;
  /// All end with `error`.
  void abandon(std::exception_ptr error);
  /// See Communicator::cancel; false for work that is not of here.
  bool cancel(Work& work);
  bool idle();

 private:
  class StagedWork;
  static constexpr std::size_t kInFlight = 3;

  Stager(std::shared_ptr<GpuLibrary> gpu, int device, std::shared_ptr<Communicator> messages,
         std::shared_ptr<Communicator> collectives);
  // With the mutex held:
  void step();
  /// An earlier operation that has to begin on the host before `work` may, else itself.
  StagedWork& next_to_begin(StagedWork& work);

  std::shared_ptr<GpuLibrary> gpu_;
  int device_;
  std::shared_ptr<Communicator> messages_, collectives_;
  std::shared_ptr<PinnedPool> pool_;
  std::unique_ptr<GpuStream> out_, in_;  // away from the device, and back
  std::mutex mutex_;
  std::deque<std::shared_ptr<StagedWork>> under_way_;
};

}  // namespace samestep
