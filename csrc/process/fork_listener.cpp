#include "process/fork_listener.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace samestep {
namespace {

struct Listeners {
  std::mutex mutex;
  std::vector<ForkListener*> all;
};

// Never destroyed: handlers of the C library stay until the process ends.
Listeners& listeners() {
  static auto* const instance = [] {
    auto* const made = new Listeners;
    // The forking thread holds the mutex during the fork. So a listener is notified either by all three handlers or by
    // none, and the child does not inherit a list that another thread was changing.
    ::pthread_atfork(
        [] {
          listeners().mutex.lock();
          for (ForkListener* listener : listeners().all) listener->before_fork();
        },
        [] {
          for (ForkListener* listener : listeners().all) listener->after_fork_in_parent();
          listeners().mutex.unlock();
        },
        [] {
          for (ForkListener* listener : listeners().all) listener->after_fork_in_child();
          listeners().mutex.unlock();
        });
    return made;
  }();
  return *instance;
}

}  // namespace

void ForkListener::register_listener() {
  const std::lock_guard lock(listeners().mutex);
  listeners().all.push_back(this);
}

void ForkListener::unregister_listener() {
  const std::lock_guard lock(listeners().mutex);
  std::erase(listeners().all, this);
}

}  // namespace samestep
