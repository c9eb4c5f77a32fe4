# Our own code under LATENTKV_SANITIZE, and what is linked with it.
set(sanitized latentkv_kernels latentkv_native)
if(TARGET latentkv_threads)
    list(APPEND sanitized latentkv_threads)
endif()
# Threads of a graph hand each other data by atomics of ggml-cpu, which a sanitizer of threads has to see.
if(LATENTKV_SANITIZE STREQUAL thread)
    list(APPEND sanitized ggml-base ggml-cpu)
endif()
foreach(target IN LISTS sanitized)
    target_compile_options(${target} PUBLIC -fsanitize=${LATENTKV_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${LATENTKV_SANITIZE})
endforeach()
# As in a Release build: its assertions that numbers are finite end a program that reads weights from strangers.
foreach(target ggml-base ggml-cpu)
    target_compile_definitions(${target} PRIVATE NDEBUG)
endforeach()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # GCC 12 takes std::regex for uninitialized under them
    target_compile_options(latentkv_native PUBLIC -Wno-maybe-uninitialized)
    target_compile_options(latentkv_kernels PUBLIC -Wno-maybe-uninitialized)
endif()
