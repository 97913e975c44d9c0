#include "process/wait_hooks.h"

namespace samestep {

WaitHooks& wait_hooks() {
  static auto& hooks = *new WaitHooks;  // never destroyed: threads may wait while the process ends
  return hooks;
}

}  // namespace samestep
