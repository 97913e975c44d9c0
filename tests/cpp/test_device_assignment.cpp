#include <doctest/doctest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "select/device_assignment.h"

namespace samestep {
namespace {

using Devices = std::vector<std::optional<int>>;

// What each rank of one host is given.
Devices assign_all(const DeviceRequest& request, int local_size, int n_visible) {
  Devices devices;
  for (int rank = 0; rank < local_size; ++rank) {
    devices.push_back(assign_device("cuda", request, rank, local_size, n_visible, "nothing"));
  }
  return devices;
}

DeviceRequest list_of(std::vector<int> devices) { return {DeviceRequest::Kind::list, std::move(devices)}; }

template <class Error>
std::string error_text(const DeviceRequest& request, int local_rank, int local_size, int n_visible) {
  try {
    assign_device("cuda", request, local_rank, local_size, n_visible, "libcuda.so.1 was not found");
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("assign_device: round robin starts at 0 and no device is shared while one is free") {
  for (int local_size = 1; local_size <= 9; ++local_size) {
    for (int n_visible = 1; n_visible <= 9; ++n_visible) {
      std::map<int, int> users;
      const Devices devices = assign_all({}, local_size, n_visible);
      for (const auto& device : devices) ++users[device.value()];
      CHECK(devices[0] == 0);
      CHECK(users.rbegin()->first < n_visible);
      const int fair = (local_size + n_visible - 1) / n_visible;
      for (const auto& [device, n] : users) CHECK(n <= fair);
    }
  }
}

TEST_CASE("assign_device: hosts with unequal ranks count their own ranks") {
  CHECK(assign_all({}, 4, 4) == Devices{0, 1, 2, 3});
  CHECK(assign_all({}, 2, 4) == Devices{0, 1});
  CHECK(assign_all({}, 3, 2) == Devices{0, 1, 0});
}

TEST_CASE("assign_device: one visible device for each process is device 0 for all") {
  CHECK(assign_all({}, 4, 1) == Devices{0, 0, 0, 0});
}

TEST_CASE("assign_device: without a device, or left alone, nothing") {
  CHECK(assign_all({}, 2, 0) == Devices{std::nullopt, std::nullopt});
  CHECK(assign_all({DeviceRequest::Kind::leave_alone}, 2, 4) == Devices{std::nullopt, std::nullopt});
}

TEST_CASE("assign_device: a list gives each local rank its entry; more entries than ranks are allowed") {
  CHECK(assign_all(list_of({3, 1}), 2, 4) == Devices{3, 1});
  CHECK(assign_all(list_of({2, 2, 9}), 2, 4) == Devices{2, 2});
}

TEST_CASE("assign_device: a wrong list is refused by every rank of the host") {
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(error_text<InvalidArgumentError>(list_of({0, 1}), rank, 3, 4) ==
          "cuda_devices has 2 entries, but this host has 3 ranks: give one device for each node-local rank");
    CHECK(contains(error_text<InvalidArgumentError>(list_of({0, -1, 2}), rank, 3, 4), "cuda_devices[1] is -1"));
    CHECK(contains(error_text<UnavailableError>(list_of({0, 1, 4}), rank, 3, 4),
                   "cuda_devices[2] is 4, but this process sees 4 cuda devices"));
    CHECK(contains(error_text<UnavailableError>(list_of({0, 1, 2}), rank, 3, 0), "libcuda.so.1 was not found"));
  }
}

TEST_CASE("assign_device: a local rank outside the host") {
  CHECK(contains(error_text<InvalidArgumentError>({}, 2, 2, 1), "local rank 2 is outside [0, 2)"));
  CHECK(contains(error_text<InvalidArgumentError>({}, -1, 2, 1), "local rank -1"));
}

}  // namespace
}  // namespace samestep
