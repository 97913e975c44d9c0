#include "device/refusal.h"

#include <algorithm>

#include "core/deadline.h"
#include "core/error.h"
#include "core/format.h"
#include "process/user_call.h"
#include "waiting/await.h"

namespace samestep::refusal {
namespace {

constexpr Seconds kForOthers{5.0};  // to make the same call, until this rank waits no longer

}  // namespace

std::string text(std::string_view verb, std::string_view why) {
  const std::string again = str(verb, ": ");
  if (why.starts_with(again)) why.remove_prefix(again.size());
  std::string whole = str(verb, " of what this rank cannot take: ", why);
  constexpr std::size_t kMost = 188;  // of a description; see Collective
  return whole.size() <= kMost ? whole : whole.substr(0, kMost - 3) + "...";
}

CollectiveArgs args() {
  return {.type = CollectiveType::barrier,
          .compared_as = Signature{.type = CollectiveType::barrier, .root = 0}};  // a barrier itself has no root
}

void tell(const std::string& text, const std::function<void(std::vector<Communicator::WorkPtr>&)>& start) {
  const UserCall quoted(text, UserCall::Inside::instead);
  std::vector<Communicator::WorkPtr> works;
  try {
    start(works);
  } catch (const Error&) {  // the group has ended, as the others know
  }
  if (works.empty()) return;
  wait_hooks().run_without_gil([&works] {
    const Deadline deadline = Deadline::after(kForOthers);
    const auto is_done = [](const auto& work) { return work->done(); };
    await([&] { return std::ranges::all_of(works, is_done) || deadline.passed(); }, [](Seconds) {});
  });
}

}  // namespace samestep::refusal
