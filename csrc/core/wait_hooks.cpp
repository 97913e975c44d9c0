#include "core/wait_hooks.h"

namespace samestep {

WaitHooks& wait_hooks() {
  static WaitHooks hooks;
  return hooks;
}

}  // namespace samestep
