#pragma once

#include <cstdint>
#include <string>

namespace samestep {

/// The user's call, such as "synchronize(root=0)", for the error texts of operations that this thread starts on its
/// behalf. Empty if the user called the operation itself.
const std::string& user_call();

/// Sets the user's call during its lifetime.
class UserCall {
 public:
  enum class Inside : std::uint8_t {
    unchanged,  ///< has no effect inside another call, which came first
    part,       ///< appends its text to the outer call's, such as "leaf 'weight'"
    instead,    ///< replaces the outer call, to resume deferred work
  };
  explicit UserCall(std::string text, Inside inside = Inside::unchanged);
  ~UserCall();
  UserCall(const UserCall&) = delete;
  UserCall& operator=(const UserCall&) = delete;

 private:
  std::string before_;
};

}  // namespace samestep
