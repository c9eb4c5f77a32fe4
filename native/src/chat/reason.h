// What llama.cpp's chat code says in exceptions, for messages of one line.
#pragma once

#include <exception>
#include <string>

namespace lkv {

// The text of an exception in one line: without the listing of a template's source, at most 300 bytes.
std::string reason(const std::exception& error);

}  // namespace lkv
