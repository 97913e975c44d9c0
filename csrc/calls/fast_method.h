#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "communicator/communicator.h"

namespace samestep {

/// The group on which a fast call works: fields of the Python object, where no attribute has to be looked up.
struct FastTarget {
  const std::shared_ptr<Communicator>& communicator;
  double timeout;
};

/// A fast path for one method. `args` are those after self. Null without a Python error: not for this call, which
/// then falls back to the method written in Python.
using FastAttempt = PyObject* (*)(const FastTarget& target, PyObject* const* args, Py_ssize_t n_args,
                                  PyObject* keywords);

/// The attempt for the method of this name; null if there is none.
FastAttempt find_fast_collective(const char* name);
FastAttempt find_fast_message(const char* name);

}  // namespace samestep
