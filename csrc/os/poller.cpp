#include "os/poller.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>

namespace samestep {

Poller::Poller() : fd_(checked(::epoll_create1(EPOLL_CLOEXEC), "cannot watch connections")) {}

void Poller::add(int fd, std::size_t number) {
  epoll_event event{};
  // Edge-triggered: a socket can nearly always be written to, so level-triggered events for that would never end.
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = number;
  if (::epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("cannot watch a connection");
}

std::span<const Poller::Event> Poller::poll(std::span<Event> room) {
  std::array<epoll_event, 64> events;
  const int most = static_cast<int>(std::min(room.size(), events.size()));
  const int n = ::epoll_wait(fd_.get(), events.data(), most, 0);
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const bool hung_up = (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    room[static_cast<std::size_t>(i)] = {event.data.u64, (event.events & EPOLLIN) != 0, (event.events & EPOLLOUT) != 0,
                                         hung_up};
  }
  // A call that a signal has interrupted reports nothing. The changes are reported by the next one.
  return room.first(static_cast<std::size_t>(std::max(n, 0)));
}

void wait_until_ready(int fd, bool to_write, std::chrono::milliseconds most) {
  pollfd entry{fd, static_cast<short>(to_write ? POLLIN | POLLOUT : POLLIN), 0};
  ::poll(&entry, 1, static_cast<int>(most.count()));
}

}  // namespace samestep
