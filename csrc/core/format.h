#pragma once

#include <sstream>
#include <string>
#include <utility>

namespace samestep {

/// Concatenates its arguments as `std::ostream` prints them.
template <class... Parts>
std::string str(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return std::move(out).str();
}

}  // namespace samestep
