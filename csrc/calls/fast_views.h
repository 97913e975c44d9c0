#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "arrays/array_view.h"
#include "calls/memory_in_use.h"

namespace samestep {

// What the fast paths share.

/// Contiguous memory that no operation in progress disturbs, writable if requested. Null if the method in Python must
/// handle the array.
inline const ArrayView* borrow_anywhere(PyObject* object, bool written, Array& array) {
  if (!try_view(object, array)) return nullptr;  // the method in Python reports the error
  const ArrayView& view = array.view();
  const bool fits = view.contiguous && !(written && view.readonly);
  return fits && !memory_in_use::is_taken(view, written) ? &view : nullptr;
}

/// The same for host memory alone.
inline const ArrayView* borrow_view(PyObject* object, bool written, Array& array) {
  const ArrayView* const view = borrow_anywhere(object, written, array);
  return view != nullptr && view->device.kind == DeviceKind::cpu ? view : nullptr;
}

/// Reads a small integer. False for anything else, which the method in Python handles.
inline bool parse_small(PyObject* object, int& to) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  to = static_cast<int>(value);
  return overflow == 0 && value == to;
}

/// Polls before the GIL is released: short operations complete before another thread could take it.
inline int polls_for(std::size_t nbytes) { return nbytes < (64 << 10) ? 400 : 0; }

}  // namespace samestep
