#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "bindings/array_view.h"

namespace samestep {

// What the hot calls have in common.

/// Contiguous host memory, writable if it is to be written. Null where the general path has to look.
inline const ArrayView* view_as_it_lies(PyObject* object, bool written, Array& array) {
  if (!try_view(object, array)) return nullptr;  // the general path says what is wrong with it
  const ArrayView& view = array.view();
  const bool fits = view.contiguous && view.device.kind == DeviceKind::cpu && !(written && view.readonly);
  return fits ? &view : nullptr;
}

/// A small number as it is: false for all else, which the general path has to look at.
inline bool parse_small(PyObject* object, int& to) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  to = static_cast<int>(value);
  return overflow == 0 && value == to;
}

/// How often to poll before the GIL is given away: short operations end sooner than it changes hands.
inline int polls_for(std::size_t nbytes) { return nbytes < (64 << 10) ? 400 : 0; }

}  // namespace samestep
