#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "arrays/array_view.h"

namespace samestep {

class PendingWork;

/// The memory that the operations in progress of this process use, whatever their groups.
///
/// Two operations in progress on the same memory have a result that depends on when their data are sent. So a call
/// first ends those that write what it uses, or use what it writes: all come out as if each had been waited for. Only
/// a message behind a message is refused, because the peer may wait in the same way.
namespace memory_in_use {

/// Memory of one array.
struct Use {
  const std::byte* begin;
  std::size_t nbytes;               ///< from the first byte of any element to the last one of any
  bool written;                     ///< not only read
  const ArrayView* gaps = nullptr;  ///< the array, if its elements do not fill these bytes
};
Use use_of(const ArrayView& view, bool written);

/// Whether an operation in progress writes elements of `view`, or uses any if `written`. A load where none is in
/// progress.
bool is_taken(const ArrayView& view, bool written);

bool any();
/// Ends the operations for which `is_taken` is true. True if there were any: arrays may be elsewhere now. `is_message`:
/// throws InvalidArgumentError, which begins with `what`, for those that are messages as well.
bool settle(PyObject* array, const ArrayView& view, bool written, bool is_message, const char* what);

/// Until `remove`.
void add(const std::shared_ptr<PendingWork>& work, std::span<const Use> uses);
void remove(const PendingWork& work, std::span<const Use> uses) noexcept;

}  // namespace memory_in_use

}  // namespace samestep
