// CUDA tensors for a build of torch without CUDA. Their memory is of the runtime that SAMESTEP_CUDART_LIBRARY names, a
// stand-in whose memory the host can access; the host computes, once the default stream has done what came before.
// To be loaded before torch is imported.
//
//   TORCH_ON_FAKES_NO_COPIES  1: copies return at once, for measurements of what is around them

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

using at::Tensor;
using c10::Device;
using c10::Stream;

template <class... Args>
void call(const char* name, Args... args) {
  static void* const library = ::dlopen(std::getenv("SAMESTEP_CUDART_LIBRARY"), RTLD_NOW);
  const auto function = library != nullptr ? reinterpret_cast<int (*)(Args...)>(::dlsym(library, name)) : nullptr;
  TORCH_CHECK(function != nullptr && function(args...) == 0, name);
}
Device current_device() {
  int index = 0;
  call("cudaGetDevice", &index);
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
void use_device(const Device& device) {
  if (device != current_device()) call("cudaSetDevice", int{device.index()});
}

c10::DeviceIndex n_devices() {
  int n = 0;
  call("cudaGetDeviceCount", &n);
  return static_cast<c10::DeviceIndex>(n);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  Device getDevice() const override { return current_device(); }
  void setDevice(Device device) const override { use_device(device); }
  void uncheckedSetDevice(Device device) const noexcept override { use_device(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = current_device();
    use_device(device);
    return before;
  }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return n_devices(); }
  void record(void**, const Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

/// Autograd runs nothing on devices without these.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return n_devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device().index(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* data = nullptr;
    if (nbytes != 0) call("cudaMalloc", &data, nbytes);
    return {data, data, &free, current_device()};
  }
  static void free(void* data) { call("cudaFree", data); }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
} memory;

void await_stream() { call("cudaStreamSynchronize", static_cast<void*>(nullptr)); }

/// The same memory, for kernels of the host. Valid for as long as `x`.
Tensor on_host(const Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  const auto options = at::TensorOptions().dtype(x.dtype()).device(at::kCPU);
  const Tensor y = at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), options);
  y._set_conj(x.is_conj());
  y._set_neg(x.is_neg());
  return y;
}

/// Arguments or results of a kernel, with all tensors replaced.
template <class Replace>
void replace_tensors(torch::jit::Stack& stack, std::size_t n, const Replace& replace) {
  for (std::size_t i = stack.size() - n; i < stack.size(); ++i) {
    c10::IValue& value = stack[i];
    if (value.isTensor()) {
      value = replace(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(replace(x));
      value = list;
    }
  }
}

/// Whatever is not below: a kernel of the host.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  await_stream();
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<std::pair<Tensor, Tensor>> known;  // on the device and on the host
  replace_tensors(*stack, op.schema().arguments().size(), [&](const Tensor& x) {
    const Tensor y = on_host(x);
    if (!x.is_same(y)) known.emplace_back(x, y);
    return y;
  });
  for (c10::IValue& value : *stack) {
    if (value.isDevice()) value = Device(at::kCPU);
  }
  op.callBoxed(stack);
  replace_tensors(*stack, op.schema().returns().size(), [&](const Tensor& y) {
    for (const auto& [x, on_host_too] : known) {
      if (on_host_too.is_same(y)) return x;
    }
    if (!y.defined() || !y.is_cpu()) return y;
    const Tensor made = at::empty_strided(y.sizes(), y.strides(), y.options().device(current_device()));
    on_host(made).copy_(y);
    return made;
  });
}

Tensor empty(at::IntArrayRef shape, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(shape, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef shape, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(shape, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

std::atomic<long> n_copies{0};

bool leaves_out_copies() {
  static const bool given = std::getenv("TORCH_ON_FAKES_NO_COPIES") != nullptr;
  return given;
}
Tensor& copy_(Tensor& to, const Tensor& from, bool) {
  ++n_copies;
  if (leaves_out_copies()) return to;
  await_stream();
  on_host(to).copy_(on_host(from));
  return to;
}
/// One kernel for all, as in CUDA.
void foreach_copy_(at::TensorList to, at::TensorList from, bool) {
  ++n_copies;
  if (leaves_out_copies()) return;
  await_stream();
  for (std::size_t i = 0; i < to.size(); ++i) {
    TORCH_CHECK(!from[i].is_conj() && !from[i].is_neg(), "the kernel copies what lies in memory");
    on_host(to[i]).copy_(on_host(from[i]));
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_foreach_copy_", &foreach_copy_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

[[maybe_unused]] const bool is_ready = [] {
  c10::SetAllocator(c10::kCUDA, &memory);
  torch::utils::set_requires_device_init(c10::kCUDA, false);
  return true;
}();

}  // namespace

/// Launches of kernels that copy, so far.
extern "C" __attribute__((visibility("default"))) long torchCopies() { return n_copies; }
