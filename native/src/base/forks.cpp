#include "base/forks.h"

// ggml/src/ggml-threading.h, which is not among ggml's public headers
extern "C" {
void ggml_critical_section_start(void);
void ggml_critical_section_end(void);
}

namespace lkv {

void guard_forks() {
    static const int registered =
        pthread_atfork(ggml_critical_section_start, ggml_critical_section_end, ggml_critical_section_end);
    static_cast<void>(registered);
    forks();
}

}  // namespace lkv
