#include "communicator/signature.h"

#include <algorithm>
#include <utility>

#include "core/format.h"

namespace samestep {
namespace {

enum class Elements : std::uint8_t { none, variable, shaped };  // what an operation moves

struct CollectiveTraits {
  std::string_view name;
  Elements elements = Elements::shaped;
  bool reduces = false;
  std::string_view root = {};   // "to" or "from"
  std::string_view torch = {};  // its name in torch.distributed, if different
};

// In the order of CollectiveType, by which it is indexed. torch has no names of its own for the `v` forms: there the
// same functions take tensors of unequal lengths.
constexpr CollectiveTraits kCollectiveTraits[] = {
    {.name = "allreduce", .reduces = true, .torch = "all_reduce"},
    {.name = "reduce", .reduces = true, .root = "to"},
    {.name = "bcast", .root = "from", .torch = "broadcast"},
    {.name = "allgather", .torch = "all_gather"},
    {.name = "allgatherv", .elements = Elements::variable, .torch = "all_gather"},
    {.name = "gather", .root = "to"},
    {.name = "gatherv", .elements = Elements::variable, .root = "to"},
    {.name = "scatter", .root = "from"},
    {.name = "scatterv", .elements = Elements::variable, .root = "from"},
    {.name = "reduce_scatter", .reduces = true},
    {.name = "alltoall", .torch = "all_to_all"},
    {.name = "alltoallv", .elements = Elements::variable, .torch = "all_to_all"},
    {.name = "barrier", .elements = Elements::none},
    {.name = "group creation", .elements = Elements::none},
    {.name = "close", .elements = Elements::none},
};
static_assert(std::size(kCollectiveTraits) == static_cast<std::size_t>(CollectiveType::close) + 1);

const CollectiveTraits& traits_of(CollectiveType verb) { return kCollectiveTraits[static_cast<std::size_t>(verb)]; }

/// "2 arrays of float32[6]"
std::string list_text(const ListShape& list, DType dtype) {
  return str(list.length, list.length == 1 ? " array of " : " arrays of ", name(dtype), "[", list.count, "]");
}

ListShape list_of(const Shape& shape) { return {shape.extents[0], shape.extents[1], shape.extents[2]}; }

std::string extents_text(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.n_dims; ++i) {
    text += str(i == 0 ? "" : ", ", shape.extents[static_cast<std::size_t>(i)]);
  }
  text += "]";
  if (shape.memory_order == 0) return text;
  std::string axes;
  for (std::uint64_t left = shape.memory_order; left > 1; left >>= 4) {
    axes = str(left & 0xF, axes.empty() ? "" : ", ", axes);
  }
  return str(text, " with axes (", axes, ") from the outermost to the innermost");
}

// "rank 3", "ranks 0, 2, 5-7".
std::string ranks_text(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last - i < 2) last = i;  // "1, 2", not "1-2"
    text += str(i == 0 ? "" : ", ", ranks[i]);
    if (last > i) text += str("-", ranks[last]);
    i = last + 1;
  }
  return text;
}

// A description begins with the operation, followed by " of " and its elements, by the arguments of a user's call, or
// by the second line.
std::string_view verb_of(std::string_view description) {
  return description.substr(0, std::min({description.find(" of "), description.find('('), description.find('\n')}));
}

/// A description has one or two lines. Keeps the first lines, or, if those are equal on all ranks, both joined.
void choose_lines(std::vector<std::string>& descriptions) {
  const auto first = [](const std::string& text) { return std::string_view(text).substr(0, text.find('\n')); };
  const bool same = std::ranges::all_of(
      descriptions, [&](const std::string& text) { return first(text) == first(descriptions.front()); });
  for (std::string& text : descriptions) {
    const std::size_t end = text.find('\n');
    if (end == std::string::npos) continue;
    const std::string second = text.substr(end + 1);
    const bool same_verb = verb_of(first(text)) == verb_of(second);  // a verb compiled by JAX calls itself
    text = !same ? str(first(text)) : same_verb ? second : str(first(text), ", in it ", second);
  }
}

}  // namespace

std::string_view name(CollectiveType verb, Naming naming) {
  const CollectiveTraits& facts = traits_of(verb);
  return naming == Naming::torch && !facts.torch.empty() ? facts.torch : facts.name;
}

std::uint64_t digest(CollectiveType verb, DType dtype, ReduceOp op, std::int32_t root, const Shape& shape) {
  // All small fields share one word: each step of `mix` is a multiplication that waits for the one before.
  std::uint64_t h =
      mix(0, std::uint64_t{static_cast<std::uint8_t>(verb)} | std::uint64_t{static_cast<std::uint8_t>(dtype)} << 8 |
                 std::uint64_t{static_cast<std::uint8_t>(op)} << 16 | std::uint64_t{shape.n_dims} << 24 |
                 std::uint64_t{static_cast<std::uint32_t>(root)} << 32);
  for (std::size_t i = 0; i < shape.n_dims; ++i) h = mix(h, shape.extents[i]);
  return mix(h, shape.memory_order);
}

std::uint64_t Signature::digest() const { return samestep::digest(type, dtype, op, root, shape); }

std::string Signature::describe(Naming naming) const {
  const CollectiveTraits& facts = traits_of(type);
  const bool is_list = shape.memory_order == Shape::kListOfArrays;
  const ListShape list = list_of(shape);
  std::string text{name(type, naming)};
  if (facts.elements != Elements::none) text += str(" of ", is_list ? list_text(list, dtype) : name(dtype));
  // Variable forms show no shape: their counts may differ between ranks and are not compared.
  if (facts.elements == Elements::shaped && !is_list) text += extents_text(shape);
  if (facts.reduces) text += str(" with op ", name(op));
  if (root >= 0) {
    text += str(" ", facts.root.empty() ? "with" : facts.root);
    if (is_list) text += str(" array ", list.detail, " of");
    text += str(" root ", root);
  }
  return text;
}

Description description(const std::string& call, const std::string& operation) {
  const std::string second = operation.substr(0, sizeof(Description) - 1);
  const std::size_t left = sizeof(Description) - 1 - second.size();
  std::string first = call.empty() ? "" : call + "\n";
  if (first.size() > left) {
    constexpr std::string_view kCut = "...\n";
    std::size_t end = left < kCut.size() ? 0 : left - kCut.size();
    while (end > 0 && (static_cast<unsigned char>(call[end]) & 0xC0U) == 0x80U) --end;  // within a letter of UTF-8
    first = end == 0 ? "" : str(call.substr(0, end), kCut);
  }
  Description result{};  // ends in a zero
  std::ranges::copy(first + second, result.begin());
  return result;
}

std::string mismatch_text(const std::string& group, std::uint64_t sequence,
                          std::vector<std::string> description_of_rank) {
  choose_lines(description_of_rank);
  std::vector<std::pair<std::string, std::vector<std::size_t>>> ranks_of;  // in order of the first rank
  for (std::size_t rank = 0; rank < description_of_rank.size(); ++rank) {
    const std::string& description = description_of_rank[rank];
    auto found = std::ranges::find(ranks_of, description, [](const auto& entry) { return entry.first; });
    if (found == ranks_of.end()) found = ranks_of.insert(found, {description, {}});
    found->second.push_back(rank);
  }

  // The headline names the operation only if all ranks call the same one: no rank is known to be right.
  const auto verb = ranks_of.empty() ? std::string_view{} : verb_of(ranks_of.front().first);
  const bool one_verb = std::ranges::all_of(ranks_of, [&](const auto& entry) { return verb_of(entry.first) == verb; });
  const std::string where = str("operation ", sequence, " of group '", group, "'");
  std::string text = one_verb && !verb.empty() ? str(verb, " (", where, ")") : where;
  text += ": the ranks do not agree.";
  const char* separator = " ";
  for (const auto& [description, ranks] : ranks_of) {
    text += str(separator, ranks_text(ranks), ": ", description);
    separator = "; ";
  }
  return text +
         ". All ranks must call the same operations in the same order, with equal shapes, dtypes, ops and roots.";
}

}  // namespace samestep
