#pragma once

#include <exception>

struct _object;  // of Python, which calls it PyObject

namespace samestep {

/// Sets the Python error that stands for `error`: the class of samestep.errors with the same name, or the one
/// that a Python callback raised. With the GIL held.
void set_python_error(std::exception_ptr error);

/// The same as an object, without raising it; a new reference.
_object* make_python_error(std::exception_ptr error);

}  // namespace samestep
