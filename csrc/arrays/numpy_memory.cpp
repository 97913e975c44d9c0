#include "arrays/numpy_memory.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "core/format.h"

namespace samestep {

namespace py = pybind11;

namespace {

// From numpy/ndarraytypes.h and numpy/__multiarray_api.h, in this form since NumPy 1.22 (NEP 49): the project is built
// without NumPy. Slots of the function table never change their meaning.
extern "C" {
struct DataAllocator {
  void* ctx;
  void* (*malloc)(void* ctx, std::size_t nbytes);
  void* (*calloc)(void* ctx, std::size_t count, std::size_t itemsize);
  void* (*realloc)(void* ctx, void* data, std::size_t nbytes);
  void (*free)(void* ctx, void* data, std::size_t nbytes);
};
struct DataHandler {
  char name[127];
  std::uint8_t version;
  DataAllocator allocator;
};
}
constexpr const char* kCapsule = "mem_handler";
constexpr std::uint8_t kVersion = 1;
constexpr std::string_view kName = "samestep_shared_arrays";

enum Slot : std::size_t { kSetHandler = 304, kGetHandler = 305 };

/// What is needed of NumPy's table.
struct DataMemory {
  PyObject* (*set_handler)(PyObject* handler);  // returns the one before
  PyObject* (*get_handler)();

  static DataMemory load() {
    const py::object capsule = py::detail::import_numpy_core_submodule("multiarray").attr("_ARRAY_API");
    auto** const table = static_cast<void**>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    if (table == nullptr) throw py::error_already_set();
    return {reinterpret_cast<PyObject* (*)(PyObject*)>(table[kSetHandler]),
            reinterpret_cast<PyObject* (*)()>(table[kGetHandler])};
  }
};

DataHandler* handler_in(PyObject* capsule) {
  auto* const handler = static_cast<DataHandler*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (handler == nullptr) throw py::error_already_set();
  if (handler->version != kVersion) {
    throw UnavailableError(str("shared_arrays=True: NumPy's memory handler has version ", int{handler->version},
                               ", and this samestep knows version 1"));
  }
  return handler;
}

/// What a handler of ours works with. NumPy calls it from any thread, with or without the GIL: no Python in here.
struct Source {
  DataHandler handler;  // first: the capsule points to it
  std::shared_ptr<SharedHeap> heap;
  std::atomic<bool> active = true;  // relaxed: an allocation at the same time may use either memory
  py::object previous;              // keeps `base` valid
  DataAllocator base;

  SharedHeap::Block from_heap(std::size_t nbytes) {
    // A null block, also where the heap has reached its limit, sends the request to the previous handler.
    // relaxed: see active
    const bool wanted = nbytes >= NumpyMemory::kMinBytes && active.load(std::memory_order_relaxed);
    return wanted ? heap->allocate(nbytes) : SharedHeap::Block{};
  }
  void* malloc(std::size_t nbytes) {
    void* const data = from_heap(nbytes).data;
    return data != nullptr ? data : base.malloc(base.ctx, nbytes);
  }
  void* calloc(std::size_t count, std::size_t itemsize) {
    std::size_t nbytes = 0;
    if (__builtin_mul_overflow(count, itemsize, &nbytes)) return nullptr;
    const SharedHeap::Block block = from_heap(nbytes);
    if (block.data == nullptr) return base.calloc(base.ctx, count, itemsize);
    if (!block.is_zero) std::memset(block.data, 0, nbytes);
    return block.data;
  }
  void* realloc(void* data, std::size_t nbytes) {
    // NumPy resizes an array by the handler that made it, which may have served it from either memory. A block of the
    // previous handler stays with it: the size of the block, which a move needs, is not known here.
    const std::size_t size = heap->size_of(data);
    if (size == 0) return base.realloc(base.ctx, data, nbytes);
    // A block that stays more than half used is kept. A smaller one moves, because shared memory is limited.
    if (nbytes <= size && nbytes > size / 2) return data;
    void* const moved = malloc(nbytes);
    if (moved == nullptr) return nullptr;
    std::memcpy(moved, data, std::min(size, nbytes));
    heap->free(data);
    return moved;
  }
  void free(void* data, std::size_t nbytes) {
    // The heap knows its own blocks. A header in each block would say the same, but cost the alignment to pages.
    if (!heap->free(data)) base.free(base.ctx, data, nbytes);
  }
};

Source* source(void* ctx) { return static_cast<Source*>(ctx); }

extern "C" {
void* samestep_malloc(void* ctx, std::size_t nbytes) { return source(ctx)->malloc(nbytes); }
void* samestep_calloc(void* ctx, std::size_t count, std::size_t itemsize) {
  return source(ctx)->calloc(count, itemsize);
}
void* samestep_realloc(void* ctx, void* data, std::size_t nbytes) { return source(ctx)->realloc(data, nbytes); }
void samestep_free(void* ctx, void* data, std::size_t nbytes) { source(ctx)->free(data, nbytes); }
void samestep_drop(PyObject* capsule) { delete source(PyCapsule_GetContext(capsule)); }
}

/// Null if the handler is not one of ours.
Source* source_of(PyObject* capsule) {
  return handler_in(capsule)->name == kName ? source(PyCapsule_GetContext(capsule)) : nullptr;
}

/// The handler in force, below those of ours that have been removed elsewhere.
/// Otherwise each initialize() after a finalize() in another context would put a handler on top of one that only
/// delegates, and allocations would pass through ever more of them.
py::object handler_in_force(const DataMemory& numpy) {
  auto capsule = py::reinterpret_steal<py::object>(numpy.get_handler());
  if (!capsule) throw py::error_already_set();
  for (Source* ours = source_of(capsule.ptr()); ours != nullptr && !ours->active; ours = source_of(capsule.ptr())) {
    capsule = py::object(ours->previous);
  }
  return capsule;
}

void set_handler(const DataMemory& numpy, PyObject* capsule) {
  const auto before = py::reinterpret_steal<py::object>(numpy.set_handler(capsule));
  if (!before) throw py::error_already_set();
}

}  // namespace

NumpyMemory::NumpyMemory(std::shared_ptr<SharedHeap> heap) {
  const DataMemory numpy = DataMemory::load();
  py::object previous = handler_in_force(numpy);
  auto made = std::make_unique<Source>();
  made->heap = std::move(heap);
  made->base = handler_in(previous.ptr())->allocator;
  made->previous = std::move(previous);
  // NumPy keeps the capsule in each array that it makes, and the capsule owns the Source: the handler and its heap
  // outlive their last array.
  made->handler = {{}, kVersion, {made.get(), samestep_malloc, samestep_calloc, samestep_realloc, samestep_free}};
  std::copy(kName.begin(), kName.end(), made->handler.name);
  handler_ = py::reinterpret_steal<py::object>(PyCapsule_New(&made->handler, kCapsule, nullptr));
  if (!handler_ || PyCapsule_SetContext(handler_.ptr(), made.get()) != 0) throw py::error_already_set();
  // Set last: until here an exception must leave the Source to `made`.
  PyCapsule_SetDestructor(handler_.ptr(), samestep_drop);
  (void)made.release();
  set_handler(numpy, handler_.ptr());
}

void NumpyMemory::remove() {
  if (!handler_) return;
  Source* const ours = source_of(handler_.ptr());
  // Contexts that were copied from this one keep the handler and cannot be reached from here. From now on it delegates
  // there.
  ours->active = false;
  ours->heap->set_bounds(0, 0);
  const DataMemory numpy = DataMemory::load();
  const auto current = py::reinterpret_steal<py::object>(numpy.get_handler());
  if (current.is(handler_)) set_handler(numpy, ours->previous.ptr());
  handler_ = py::object();
}

}  // namespace samestep
