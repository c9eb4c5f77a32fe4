// Whole sessions on the GPU against the same on the CPU: random legal combinations of windows, row formats and plans, on small random
// models of every path. Both decode a prompt in pieces, single tokens, and a second sequence.
#include <cctype>
#include <cstdio>
#include <map>
#include <string>

#include "cuda/session/families.h"
#include "devices/gpus.h"

int main(int argc, char** argv) {
    using namespace lkv::test;
    std::string why;
    if (lkv::count_gpus(why) == 0) {
        std::printf("gpu_session: skipped: %s\n", why.c_str());
        return 77;
    }
    const std::map<std::string, int (*)(Arguments)> families = {{"roles", roles},     {"evictions", evictions},
                                                                {"memory", memory},   {"choices", choices},
                                                                {"guesses", guesses}, {"across", across}};
    const Arguments arguments(argv + 1, argv + argc);
    if (arguments.empty() || std::isdigit(static_cast<unsigned char>(arguments[0][0])) != 0) return sessions(arguments);
    const auto family = families.find(arguments[0]);
    if (family != families.end()) return family->second(arguments.subspan(1));
    std::fprintf(
        stderr,
        "[gpu_session] expected a number of rounds, roles, evictions, memory, choices, guesses or across; got %s\n",
        arguments[0]);
    return 1;
}
