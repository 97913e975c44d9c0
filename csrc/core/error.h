#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace samestep {

/// Base of every error this package throws. One subclass for each reaction of a caller;
/// each becomes the Python class of the same name in `samestep.errors`.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's mistake; retrying cannot help.                        Python: ValueError
class InvalidArgumentError : public Error {
 public:
  using Error::Error;
};

/// Ranks disagree about one operation; every rank of the group throws the same text, and
/// the group stays usable.                                            Python: ValueError
class MismatchError : public Error {
 public:
  using Error::Error;
};

/// The group was closed, or never opened, or this process was forked from its rank.
///                                                                    Python: RuntimeError
class NotInitializedError : public Error {
 public:
  using Error::Error;
};

/// A backend, library or device cannot be used; says what was looked for and the cure.
///                                                                    Python: RuntimeError
class UnavailableError : public Error {
 public:
  using Error::Error;
};

/// Ranks of the group of the call, and their hosts where there are several.
struct NamedRanks {
  std::vector<int> ranks = {};
  std::vector<std::string> hosts = {};  ///< by rank of `ranks`; empty if all ranks run on one host
};

/// Other ranks are the cause: those that are named, if any are known.
class RanksError : public Error {
 public:
  explicit RanksError(const std::string& text, NamedRanks named = {}) : Error(text), named_(std::move(named)) {}
  const NamedRanks& named() const { return named_; }

 private:
  NamedRanks named_;
};

/// The deadline passed; the peers may still be alive.                 Python: TimeoutError
class TimeoutError : public RanksError {
 public:
  using RanksError::RanksError;
};

/// A peer closed or died; the group is unusable.                      Python: ConnectionError
class PeerLostError : public RanksError {
 public:
  using RanksError::RanksError;
};

/// A peer has left a block of `together()`; the group was revoked.    Python: RuntimeError
class StepError : public Error {
 public:
  using Error::Error;
};

/// The message of an exception, which is not null.
inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

/// Whether an exception, which is not null, is of this class or derived from it.
template <class Kind>
bool is_a(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Kind&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// The message of an exception as other ranks read it: std::bad_alloc names a class of C++.
inline std::string reason_of(const std::exception_ptr& error) {
  return is_a<std::bad_alloc>(error) ? "no memory is left" : text_of(error);
}

}  // namespace samestep
