#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "nccl/device_communicator.h"
#include "nccl/packer.h"

namespace samestep {

namespace py = pybind11;
using py::operator""_a;

namespace {

using Launch = void (Packer::*)(std::span<const PackedLeaf>, std::span<const std::uint32_t>, void*,
                                GpuLibrary::Stream) const;

using Leaves = std::vector<std::pair<std::uintptr_t, std::size_t>>;  // address and bytes

void move(Packer& packer, Launch launch, const Leaves& given, std::uintptr_t bucket, std::uintptr_t stream) {
  if (!packer.problem().empty()) throw UnavailableError(packer.problem());
  std::vector<PackedLeaf> leaves;
  std::vector<std::uint32_t> starts;
  std::size_t at = 0;
  for (const auto& [address, nbytes] : given) {
    leaves.push_back({reinterpret_cast<void*>(address), nbytes});
    starts.push_back(static_cast<std::uint32_t>(at));
    at += (nbytes + kPackedAlignment - 1) / kPackedAlignment;
  }
  (packer.*launch)(leaves, starts, reinterpret_cast<void*>(bucket), reinterpret_cast<GpuLibrary::Stream>(stream));
}

}  // namespace

void bind_packing(py::module_& m) {
  py::class_<Packer, std::shared_ptr<Packer>>(m, "Packer", "Kernels of one device that pack arrays into a bucket.")
      .def(py::init([](std::shared_ptr<GpuLibrary> gpu, int device, std::string compiler, std::string driver,
                       std::string cache) {
             return std::make_shared<Packer>(std::move(gpu), device,
                                             PackerPaths{std::move(compiler), std::move(driver), std::move(cache)});
           }),
           "gpu"_a, "device"_a, "compiler"_a, "driver"_a, "cache"_a)
      .def("problem", &Packer::problem, "Makes the kernels, the first time. Why there are none, or \"\".")
      .def_property_readonly("compiler", &Packer::compiler)
      .def_property_readonly("cached", &Packer::cached)
      .def(
          "pack",
          [](Packer& self, const Leaves& leaves, std::uintptr_t bucket, std::uintptr_t stream) {
            move(self, &Packer::pack, leaves, bucket, stream);
          },
          "leaves"_a, "bucket"_a, "stream"_a,
          "One launch in `stream`. Leaves are given by address and bytes, the bucket by its address; in it each leaf "
          "begins at the next multiple of 16.")
      .def(
          "unpack",
          [](Packer& self, const Leaves& leaves, std::uintptr_t bucket, std::uintptr_t stream) {
            move(self, &Packer::unpack, leaves, bucket, stream);
          },
          "leaves"_a, "bucket"_a, "stream"_a);
  m.def(
      "pack_below",
      [](const std::shared_ptr<Communicator>& comm, std::size_t nbytes) {
        auto* const devices = dynamic_cast<DeviceCommunicator*>(comm.get());
        if (devices == nullptr) throw InvalidArgumentError("this group has no devices");
        devices->pack_below(nbytes);
      },
      "comm"_a, "nbytes"_a, "Which arrays a group packs, until it has done so once. The same on all ranks.");
}

}  // namespace samestep
