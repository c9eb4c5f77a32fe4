// Messages of llama.cpp's exceptions in one line.
#pragma once

#include <exception>
#include <string>

namespace lkv {

// The text of an exception in one line: without the listing of a template's source, at most 300 bytes.
std::string reason(const std::exception& error);

}  // namespace lkv
