// Collectives inside programs that JAX has compiled: XLA calls `handle_call` with the arrays of one `CompiledCall`.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "calls/pending_work.h"
#include "calls/python_errors.h"
#include "communicator/fused_collectives.h"
#include "core/error.h"
#include "core/format.h"
#include "jax/xla_ffi.h"
#include "kernels/hash128.h"
#include "process/user_call.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

/// One array that a program hands over: contiguous, in host memory.
struct ProgramArray {
  Buffer buffer;
  Shape shape;
};
using ProgramArrays = std::vector<ProgramArray>;

/// Where a group has ended that a program calls.
constexpr const char* kCure =
    "this program was compiled with that group, its rank and size: compile it again (functions of jax.jit do so after "
    "jax.clear_caches())";

/// Calls of all programs that have succeeded. Any order of memory would do: readers have waited for the programs.
std::atomic<std::uint64_t> n_succeeded = 0;

/// One place in a program where ranks communicate. Thread-safe, as the group is.
class CompiledCall {
 public:
  struct Description {
    CollectiveType type;
    Reduction reduction;
    int root;
    double timeout;
    std::string act;      ///< what the user called
    std::uint64_t names;  ///< hash of the names of a tree's leaves
    /// Called where trees differ between ranks, with the elements of `compared`; None for one array, which the group
    /// compares.
    py::object explain;
  };

  CompiledCall(std::shared_ptr<Communicator> group, Description description)
      : group_(std::move(group)), fused_(group_), description_(std::move(description)) {}
  CompiledCall(const CompiledCall&) = delete;
  CompiledCall& operator=(const CompiledCall&) = delete;
  /// The same call in another group of the same ranks. With the GIL.
  std::shared_ptr<CompiledCall> in_group(std::shared_ptr<Communicator> group) const {
    return std::make_shared<CompiledCall>(std::move(group), description_);
  }
  // A thread of XLA holds a reference during a call, so the last one may be dropped there, without the GIL.
  ~CompiledCall() {
    const py::gil_scoped_acquire gil;
    description_.explain = py::none();
  }

  /// Arrays behind those that have a result are only compared between the ranks, element by element. Without the GIL.
  void run(const ProgramArrays& in, const ProgramArrays& out) {
    try {
      run_here(in, out);
      ++n_succeeded;
    } catch (const NotInitializedError& error) {
      throw NotInitializedError(str(error.what(), "; ", kCure));
    }
  }

 private:
  void run_here(const ProgramArrays& in, const ProgramArrays& out) {
    const UserCall call(description_.act);
    const Deadline deadline = Deadline::after(Seconds(description_.timeout));
    const std::span leaves = std::span(in).first(out.size());
    if (!description_.explain.is_none()) compare(in, out.size(), deadline);
    if (description_.type == CollectiveType::allreduce) return allreduce(leaves, out, deadline);
    for (std::size_t i = 0; i < leaves.size(); ++i) run_one(in[i], out[i], deadline);
  }

  void compare(std::span<const ProgramArray> in, std::size_t n_leaves, const Deadline& deadline) {
    // FusedCollectives needs trees that agree. One short allreduce compares all leaves at once.
    std::uint64_t digest = description_.names;
    for (const ProgramArray& array : in) {
      const Signature one{.type = description_.type, .dtype = array.buffer.dtype, .shape = array.shape};
      digest = mix(digest, one.digest());
    }
    for (const ProgramArray& array : in.subspan(n_leaves)) {
      digest = mix(digest, kernels::hash128(array.buffer.data, array.buffer.nbytes())[0]);
    }
    std::uint64_t both[] = {digest, ~digest};  // the largest, and the complement of the smallest
    const Buffer buffer{both, 2, DType::uint64};
    fused_.run({CollectiveType::allreduce, buffer, buffer, {ReduceOp::max}, -1, Shape::flat(2)}, deadline);
    if (both[0] == ~both[1]) return;
    const py::gil_scoped_acquire gil;
    // Collective: all ranks come here, because all have received the same two numbers. Raises the error that names a
    // leaf.
    std::vector<py::bytes> elements;
    for (const ProgramArray& array : in.subspan(n_leaves)) {
      elements.emplace_back(static_cast<const char*>(array.buffer.data), array.buffer.nbytes());
    }
    description_.explain(elements);
    throw MismatchError(str(description_.act, " in group ", group_->name(), ": the ranks pass different trees"));
  }

  void allreduce(std::span<const ProgramArray> in, const ProgramArrays& out, const Deadline& deadline) {
    std::vector<ConstBuffer> from;
    std::vector<Buffer> to;
    for (const ProgramArray& array : in) from.push_back(array.buffer);
    for (const ProgramArray& array : out) to.push_back(array.buffer);
    fused_.allreduce(from, to, description_.reduction, deadline);
  }

  void run_one(const ProgramArray& in, const ProgramArray& out, const Deadline& deadline) {
    const bool at_root = group_->rank() == description_.root;
    CollectiveArgs args{description_.type, in.buffer, out.buffer, description_.reduction, description_.root, in.shape};
    if (args.type == CollectiveType::reduce_scatter) args.shape = out.shape;
    if (args.type == CollectiveType::bcast) args.in = {};
    // The result of a program is new memory: it gets root's values there, and what a reduction leaves as it was.
    if (in.buffer.nbytes() != 0 &&
        ((args.type == CollectiveType::bcast && at_root) || (args.type == CollectiveType::reduce && !at_root))) {
      std::copy_n(static_cast<const std::byte*>(in.buffer.data), in.buffer.nbytes(),
                  static_cast<std::byte*>(out.buffer.data));
    }
    fused_.run(args, deadline);
  }

  std::shared_ptr<Communicator> group_;
  FusedCollectives fused_;
  Description description_;
};

/// The calls of all programs of this process that are alive, by number.
class CompiledCalls {
 public:
  std::int64_t add(const std::shared_ptr<CompiledCall>& call) {
    const std::lock_guard lock(mutex_);
    std::erase_if(calls_, [](const auto& entry) { return entry.second.expired(); });
    calls_[++last_] = call;
    return last_;
  }
  void replace(std::int64_t number, const std::shared_ptr<CompiledCall>& call) {
    const std::lock_guard lock(mutex_);
    calls_[number] = call;
  }
  std::shared_ptr<CompiledCall> at(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(number);
    auto call = found == calls_.end() ? nullptr : found->second.lock();
    if (call == nullptr) throw NotInitializedError(str("a program calls a group that is gone; ", kCure));
    return call;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::int64_t, std::weak_ptr<CompiledCall>> calls_;
  std::int64_t last_ = 0;
};

CompiledCalls& compiled_calls() {
  static auto* const calls = new CompiledCalls;  // never freed: threads of XLA may outlive static objects
  return *calls;
}

/// XLA's name of each DType, in the order of the enumerators.
constexpr xla::DataType kXlaTypes[kDTypeCount] = {
    xla::kBool,    xla::kInt8,      xla::kInt16,      xla::kInt32,        xla::kInt64,      xla::kUint8,
    xla::kUint16,  xla::kUint32,    xla::kUint64,     xla::kFloat16,      xla::kBfloat16,   xla::kFloat32,
    xla::kFloat64, xla::kComplex64, xla::kComplex128, xla::kFloat8E4M3FN, xla::kFloat8E5M2,
};

DType to_dtype(xla::DataType dtype) {
  const auto* const found = std::ranges::find(kXlaTypes, dtype);
  if (found == std::end(kXlaTypes)) {
    throw InvalidArgumentError(
        str("a program passes elements of XLA's type ", static_cast<int>(dtype), ", which no collective takes"));
  }
  return static_cast<DType>(found - kXlaTypes);
}

ProgramArray to_array(void* data, DType dtype, std::span<const std::int64_t> extents) {
  ProgramArray array{{data, 1, dtype}, {}};
  for (const std::int64_t extent : extents) array.buffer.count *= static_cast<std::uint64_t>(extent);
  read_shape(extents, array.shape);
  return array;
}

ProgramArrays to_arrays(const xla::Arrays& given) {
  ProgramArrays arrays;
  for (std::int64_t i = 0; i < given.size; ++i) {
    const xla::Array& array = *given.values[i];
    // The token that orders the collectives of a program is among its arguments and results, without data.
    if (array.dtype == xla::kToken) continue;
    arrays.push_back(
        to_array(array.data, to_dtype(array.dtype), {array.extents, static_cast<std::size_t>(array.n_dims)}));
  }
  return arrays;
}

std::int64_t call_number(const xla::Attributes& attributes) {
  if (attributes.size != 1 || attributes.types[0] != xla::kScalar) {
    throw UnavailableError("XLA passes other attributes than one number");
  }
  return *static_cast<const std::int64_t*>(static_cast<const xla::Scalar*>(attributes.values[0])->value);
}

/// An error as samestep.group.jax_primitive finds it again in what JAX raises.
std::string text_for_jax(const std::exception_ptr& pointer) {
  try {
    const py::gil_scoped_acquire gil;
    const auto error = py::reinterpret_steal<py::object>(make_python_error(pointer));
    return py::module_::import("samestep.group.jax_primitive").attr("text_of")(error).cast<std::string>();
  } catch (const std::exception&) {
    // Of Python code, as where modules are being torn down. JAX then raises an error of its own class with the text.
    return text_of(pointer);
  }
}

xla::Error* failed(const xla::Api& api, const std::string& text) {
  xla::ErrorArgs args{sizeof args, nullptr, text.c_str(), xla::kInternal};
  return api.create_error(&args);
}

/// What XLA calls, on one of its threads.
xla::Error* handle_call(xla::CallFrame* call) {
  // When the function is registered, XLA calls it once to ask for which version of the interface it was built.
  if (call->extensions != nullptr && call->extensions->type == xla::Extension::kMetadata) {
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(call->extensions)->metadata;
    metadata.version.major = xla::kMajorVersion;
    metadata.version.minor = xla::kMinorVersion;
    metadata.traits = 0;
    return nullptr;
  }
  if (call->stage != xla::kExecute) return nullptr;
  try {
    compiled_calls().at(call_number(call->attributes))->run(to_arrays(call->args), to_arrays(call->results));
    return nullptr;
  } catch (...) {
    // An exception must not cross XLA's C interface. Python makes the same exception again from the text.
    return failed(*call->api, text_for_jax(std::current_exception()));
  }
}

/// Arrays of NumPy, for programs that do not run on the host. All without gaps.
ProgramArrays to_arrays(const std::vector<Array>& given) {
  ProgramArrays arrays;
  for (const Array& array : given) {
    arrays.push_back(to_array(array->data, array->dtype, array->extents()));
  }
  return arrays;
}

std::vector<Array> views_of(const std::vector<py::object>& given) {
  std::vector<Array> views;
  for (const py::object& array : given) views.push_back(view_of(array.ptr()));
  return views;
}

/// A call with the number by which programs know it.
struct NumberedCall {
  std::shared_ptr<CompiledCall> call;
  std::int64_t number;

  NumberedCall(std::shared_ptr<Communicator> group, CompiledCall::Description description)
      : call(std::make_shared<CompiledCall>(std::move(group), std::move(description))),
        number(compiled_calls().add(call)) {}

  /// Programs that are compiled already call in this group of the same ranks from now on.
  void move_to(std::shared_ptr<Communicator> group) {
    call = call->in_group(std::move(group));
    compiled_calls().replace(number, call);
  }
};

}  // namespace

void bind_compiled_calls(py::module_& m) {
  py::class_<NumberedCall>(m, "CompiledCall", "One place in a program compiled by JAX where ranks communicate.")
      .def(py::init([](std::shared_ptr<Communicator> group, const std::string& verb, int op, double factor, int root,
                       double timeout, std::string act, std::uint64_t names, py::object explain) {
             return NumberedCall(std::move(group), {collective_named(verb),
                                                    {static_cast<ReduceOp>(op), factor},
                                                    root,
                                                    timeout,
                                                    std::move(act),
                                                    names,
                                                    std::move(explain)});
           }),
           "group"_a, "verb"_a, py::kw_only(), "op"_a, "factor"_a, "root"_a, "timeout"_a, "act"_a, "names"_a,
           "explain"_a)
      .def_readonly("number", &NumberedCall::number)
      .def("move_to", &NumberedCall::move_to, "group"_a, "Call in another group of the same ranks from now on.")
      .def(
          "run",
          [](const NumberedCall& self, const std::vector<py::object>& in, const std::vector<py::object>& out) {
            // The views keep the arrays alive while other threads of Python run.
            const std::vector<Array> inputs = views_of(in), outputs = views_of(out);
            const auto call = self.call;
            const py::gil_scoped_release no_gil;
            call->run(to_arrays(inputs), to_arrays(outputs));
          },
          "inputs"_a, "outputs"_a, "The call on NumPy arrays without gaps.");
  m.def(
      "n_compiled_calls", [] { return n_succeeded.load(); },
      "How many calls of compiled programs have succeeded in this process.");
  m.def(
      "compiled_call_handler", [] { return py::capsule(reinterpret_cast<void*>(&handle_call)); },
      "What XLA calls for a CompiledCall, given its `number`.");
}

}  // namespace samestep
