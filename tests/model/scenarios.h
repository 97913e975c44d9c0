#pragma once

#include <functional>
#include <vector>

#include "explorer.h"

namespace model {

/// All scenarios; each is made when it is its turn.
std::vector<std::function<Scenario()>> scenarios();

}  // namespace model
