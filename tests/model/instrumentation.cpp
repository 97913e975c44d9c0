// What a compiler calls for -fsanitize=thread before and for every access to memory, here for the Explorer instead of
// ThreadSanitizer: the code under test is the code itself, with its own memory orders. Also what it calls from
// libraries: copies, which the linker wraps, and the pause of a loop that polls.

#include <sched.h>

#include <atomic>
#include <cstring>

#include "explorer.h"

using model::explorer;
using model::Explorer;

namespace {

bool is_shared(const volatile void* address) {
  const auto* const at = static_cast<const std::byte*>(const_cast<const void*>(address));
  return at >= model::watched.begin && at < model::watched.end;
}

std::memory_order order_of(int order) { return static_cast<std::memory_order>(order & 0x7fff); }

void plain(const volatile void* address, std::size_t nbytes, bool writes) {
  if (is_shared(address)) explorer().plain(address, nbytes, writes);
}

template <class T>
T load(const volatile T* address, int order) {
  if (!is_shared(address)) return __atomic_load_n(address, __ATOMIC_SEQ_CST);
  const std::size_t word = explorer().memory().word_of(address);
  explorer().before(Explorer::Kind::load, word, order_of(order));
  explorer().loaded(word, order_of(order));
  return *address;
}

template <class T>
void store(volatile T* address, T value, int order) {
  if (!is_shared(address)) return __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
  const std::size_t word = explorer().memory().word_of(address);
  explorer().before(Explorer::Kind::store, word, order_of(order));
  explorer().stored(word, order_of(order));
  explorer().memory().note_value(word, *address, value);
  *address = value;
}

template <class T, class Change>
T update(volatile T* address, int order, Change change) {
  if (is_shared(address)) {
    const std::size_t word = explorer().memory().word_of(address);
    explorer().before(Explorer::Kind::update, word, order_of(order));
    explorer().updated(word, order_of(order));
    explorer().memory().note_value(word, *address, change(*address));
  }
  const T before = *address;
  *address = change(before);
  return before;
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define SAMESTEP_PLAIN(nbytes)                                               \
  void __tsan_read##nbytes(void* at) { plain(at, nbytes, false); }           \
  void __tsan_write##nbytes(void* at) { plain(at, nbytes, true); }           \
  void __tsan_unaligned_read##nbytes(void* at) { plain(at, nbytes, false); } \
  void __tsan_unaligned_write##nbytes(void* at) { plain(at, nbytes, true); }
SAMESTEP_PLAIN(1)
SAMESTEP_PLAIN(2)
SAMESTEP_PLAIN(4)
SAMESTEP_PLAIN(8)
SAMESTEP_PLAIN(16)
#undef SAMESTEP_PLAIN
void __tsan_read_range(void* at, std::size_t nbytes) { plain(at, nbytes, false); }
void __tsan_write_range(void* at, std::size_t nbytes) { plain(at, nbytes, true); }

#define SAMESTEP_ATOMIC(bits, T)                                                                                   \
  T __tsan_atomic##bits##_load(const volatile T* at, int order) { return load(at, order); }                        \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int order) { store(at, value, order); }                \
  T __tsan_atomic##bits##_exchange(volatile T* at, T value, int order) {                                           \
    return update(at, order, [value](T) { return value; });                                                        \
  }                                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* at, T value, int order) {                                          \
    return update(at, order, [value](T before) { return static_cast<T>(before + value); });                        \
  }                                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* at, T value, int order) {                                          \
    return update(at, order, [value](T before) { return static_cast<T>(before - value); });                        \
  }                                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int order, int) {       \
    const T wanted = *expected;                                                                                    \
    *expected = update(at, order, [&](T before) { return before == wanted ? value : before; });                    \
    return *expected == wanted;                                                                                    \
  }                                                                                                                \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T value, int order, int failure) { \
    return __tsan_atomic##bits##_compare_exchange_strong(at, expected, value, order, failure);                     \
  }
SAMESTEP_ATOMIC(8, unsigned char)
SAMESTEP_ATOMIC(32, unsigned int)
SAMESTEP_ATOMIC(64, unsigned long)
#undef SAMESTEP_ATOMIC

void* __real_memcpy(void* to, const void* from, std::size_t nbytes);
void* __real_memmove(void* to, const void* from, std::size_t nbytes);
void* __real_memset(void* to, int value, std::size_t nbytes);

void* __wrap_memcpy(void* to, const void* from, std::size_t nbytes) {
  plain(from, nbytes, false);
  plain(to, nbytes, true);
  return __real_memcpy(to, from, nbytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t nbytes) {
  plain(from, nbytes, false);
  plain(to, nbytes, true);
  return __real_memmove(to, from, nbytes);
}
void* __wrap_memset(void* to, int value, std::size_t nbytes) {
  plain(to, nbytes, true);
  return __real_memset(to, value, nbytes);
}

int __wrap_sched_yield() {
  if (model::watched.begin != nullptr) explorer().pause_in_bounded_loop();
  return 0;
}

}  // extern "C"
