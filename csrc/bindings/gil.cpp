#include "bindings/gil.h"

#include <unistd.h>

namespace samestep {

void StaysHere::stay() {
  for (;;) pause();
}

WithoutGil::~WithoutGil() {
  call_python([this] {
    PyEval_RestoreThread(thread_);
    return true;
  });
}

WithGil::WithGil() : state_(call_python(&PyGILState_Ensure)) {}

}  // namespace samestep
