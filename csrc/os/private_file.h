#pragma once

#include <optional>
#include <string>
#include <vector>

namespace samestep {

/// A file of this user's below a folder of this user's, for what may be made again: a cache. Nothing here throws.
///
/// What `name` holds in `folder`, if the file and the folder belong to this user and nobody else may write them.
std::optional<std::vector<char>> read_private_file(const std::string& folder, const std::string& name);

/// Puts `bytes` there, all at once as others see it, making the folder if need be. False if that failed.
bool write_private_file(const std::string& folder, const std::string& name, const std::vector<char>& bytes);

}  // namespace samestep
