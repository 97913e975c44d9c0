#include <chrono>
#include <cstdio>
#include <string>

#include "scenarios.h"

/// model            all scenarios
/// model NAME...    these
/// model --list     their names
int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const std::vector<std::string> wanted(argv + 1, argv + argc);
  for (const auto& make : model::scenarios()) {
    const model::Scenario scenario = make();
    if (!wanted.empty() && wanted[0] == "--list") {
      std::printf("%s\n", scenario.name.c_str());
      continue;
    }
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), scenario.name) == wanted.end()) continue;
    const auto begin = Clock::now();
    const auto found = model::explorer().explore(scenario);
    const std::chrono::duration<double> elapsed = Clock::now() - begin;
    std::printf("%-28s %8zu states %8zu executions, longest %5zu steps, %6.2f s\n", scenario.name.c_str(), found.states,
                found.executions, found.longest, elapsed.count());
    std::fflush(stdout);
  }
}
