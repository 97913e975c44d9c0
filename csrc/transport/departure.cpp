#include "transport/departure.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace samestep {

Departure Departure::of(Why why, int cause, std::string_view text) {
  using namespace std::chrono;
  Departure departure;
  departure.why = why;
  departure.cause = cause;
  // By the system clock: ranks of several hosts compare these times, and monotonic clocks of two hosts have nothing in
  // common.
  departure.time_ns = duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
  std::size_t length = std::min(text.size(), departure.text.size() - 1);
  const auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
  while (length < text.size() && length > 0 && continues(length)) --length;  // not within a character of UTF-8
  std::memcpy(departure.text.data(), text.data(), length);
  return departure;
}

}  // namespace samestep
