#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "os/fd.h"
#include "tcp/tcp_transport.h"

namespace samestep {

/// Two ends of a TCP connection within this process.
inline std::pair<Fd, Fd> connected_pair() {
  const Fd listener = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), generic, size) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), generic, &size) != 0) {
    throw_errno("listen");
  }
  Fd one = checked(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  if (::connect(one.get(), generic, size) != 0) throw_errno("connect");
  Fd other = checked(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC), "accept");
  return {std::move(one), std::move(other)};
}

/// For each rank its connections to all others.
inline std::vector<std::vector<TcpPeer>> connected_ranks(int size, bool encrypted = false) {
  const auto n = static_cast<std::size_t>(size);
  std::vector<std::vector<TcpPeer>> ranks(n);
  for (auto& peers : ranks) peers.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < n; ++j) ranks[i][j].where = "host" + std::to_string(j);
    for (std::size_t j = 0; j < i; ++j) std::tie(ranks[i][j].fd, ranks[j][i].fd) = connected_pair();
    for (std::size_t j = 0; encrypted && j < n; ++j) {
      ranks[i][j].send_key = ranks[j][i].receive_key = std::string(32, static_cast<char>(i * n + j));
    }
  }
  return ranks;
}

}  // namespace samestep
