#pragma once

#include <memory>
#include <utility>

#include "communicator/work.h"
#include "core/error.h"
#include "core/format.h"

namespace samestep {

/// A comparison of calls on lists of arrays. Its errors explain the extents that they show.
class ListSignatureCheck final : public Work {
 public:
  explicit ListSignatureCheck(std::shared_ptr<Work> inner) : inner_(std::move(inner)) {}

  bool done() override { return inner_->done(); }
  void wait(const Deadline& deadline) override {
    try {
      inner_->wait(deadline);
    } catch (const MismatchError& error) {
      throw explained(error);
    }
  }
  std::exception_ptr error() const override {
    try {
      if (const std::exception_ptr error = inner_->error()) std::rethrow_exception(error);
    } catch (const MismatchError& error) {
      return std::make_exception_ptr(explained(error));
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

 private:
  static MismatchError explained(const MismatchError& error) {
    return MismatchError(
        str(error.what(),
            " Lists of arrays are compared as [arrays, elements of each, n for the n-th list of devices that came "
            "to be used and 0 for the host, the root's array or pieces of a result]"));
  }

  std::shared_ptr<Work> inner_;
};

}  // namespace samestep
