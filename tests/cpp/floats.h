#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

/// Values of a test. Equal is equal to the bit; that and `repeated` are one call to the C library, for a loop over the
/// elements takes most of a test's time under the sanitizers.
struct Floats : std::vector<float> {
  using std::vector<float>::vector;
  bool operator==(const Floats& other) const {
    return size() == other.size() && (empty() || std::memcmp(data(), other.data(), size() * sizeof(float)) == 0);
  }
};

/// `count` values: those of `period`, again and again.
inline Floats repeated(const Floats& period, std::size_t count) {
  Floats values(count);
  std::copy_n(period.begin(), std::min(count, period.size()), values.begin());
  for (std::size_t done = period.size(); done < count; done *= 2) {
    std::copy_n(values.begin(), std::min(done, count - done), values.begin() + static_cast<std::ptrdiff_t>(done));
  }
  return values;
}
